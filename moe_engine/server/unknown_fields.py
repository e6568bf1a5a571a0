"""Log lines about unknown fields of requests, which have no effect: a misspelled field would go unnoticed."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import msgspec

from moe_engine.errors import did_you_mean
from moe_engine.frontend.generate_input import GenerateRequest
from moe_engine.sampling_checks import SamplingRequest

logger = logging.getLogger("moe_engine")

SCANNED_BYTES = 2**16
"""Longer bodies are not searched: a search takes 0.7 us for each KB."""
MAX_LINES = 64
"""Most lines of a process: clients choose the names."""

_names = msgspec.json.Decoder(dict[str, msgspec.Raw])
_reported: set[tuple[type, str]] = set()


def report_unknown(body: bytes | bytearray, kind: type[Any], names: Iterable[str] | None = None) -> None:
    """Logs each field of a valid body that its type lacks, once. `names`: the body's, if they are known."""
    if len(body) > SCANNED_BYTES:
        return
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):  # names that are no text
        for name in _names.decode(body) if names is None else names:
            if name not in kind.__struct_encode_fields__ and (kind, name) not in _reported:
                _report(name, kind)


def _report(name: str, kind: type[Any]) -> None:
    if len(_reported) < MAX_LINES:
        _reported.add((kind, name))
        logger.warning("A request has the field %.80r, which has no effect%s", name, _hint(name, kind))


def _hint(name: str, kind: type[Any]) -> str:
    if issubclass(kind, GenerateRequest) and name in SamplingRequest.__struct_encode_fields__:
        return ": it belongs into sampling_params"
    return did_you_mean(name, kind.__struct_encode_fields__)
