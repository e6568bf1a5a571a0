"""The transports that run here: those of libraries only where they load."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from moe_engine.core.kv_transfer.transports.protocol import TransportError
from moe_engine.core.kv_transfer.transports.table import TRANSPORTS, open_transport


@cache
def why_absent(name: str) -> str:
    """Empty if the transport starts here."""
    try:
        open_transport(name, "127.0.0.1", lambda peer, frames: None).close()
    except TransportError as error:
        return str(error)
    return ""


def each_transport() -> list[Any]:
    """Parameters of a test; a transport that does not start is skipped with its reason."""
    return [pytest.param(name, marks=_mark(name)) for name in TRANSPORTS]


def _mark(name: str) -> Any:
    if name in ("tcp", "shm"):
        return ()
    reason = why_absent(name)
    return pytest.mark.skipif(bool(reason), reason=reason)
