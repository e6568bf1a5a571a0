"""The available transports: those of libraries only if the library loads."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from moe_engine.core.kv_transfer.transports.protocol import TransportError
from moe_engine.core.kv_transfer.transports.table import TRANSPORTS, open_transport


@cache
def why_absent(name: str) -> str:
    """The reason why a transport cannot start; empty if it can."""
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
