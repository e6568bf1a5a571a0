"""The trace of the HTTP request that runs in this context; None without `--enable-trace`. Imports no OpenTelemetry."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class RequestTrace:
    """`context`: OpenTelemetry's context with the span of the HTTP request. `body_read_at`: monotonic seconds."""

    context: Any
    path: str
    body_read_at: float | None = None
    is_tokenized: bool = False
    """Whether the span `tokenize` was made: a request has one, also with several sequences."""


request_trace: ContextVar[RequestTrace | None] = ContextVar("request_trace", default=None)


def mark_body_read() -> None:
    """Marks the arrival of the request's body: decoding and tokenization begin."""
    trace = request_trace.get()
    if trace is not None:
        trace.body_read_at = time.monotonic()
