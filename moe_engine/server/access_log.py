"""Access log: uvicorn's lines, formatted and written with little processor time.

The logger's formatter and one write per line take a tenth of the frontend's time for a short request. Here the lines
of `WRITE_SECONDS` are written together.
"""

from __future__ import annotations

import asyncio
import http
import logging
import time
from contextlib import suppress
from typing import Any

from moe_engine.logs import DATE_FORMAT, StderrHandler

WRITE_SECONDS = 0.01
"""Max seconds from the start of a response to the write of its line."""
_PHRASES = {status.value: f" {status.phrase}" for status in http.HTTPStatus}


class AccessFormatter(logging.Formatter):
    """``[2025-11-11 13:01:09] INFO:     127.0.0.1:41234 - "POST /generate HTTP/1.1" 200 OK``"""

    def __init__(self) -> None:
        super().__init__()
        self._second = -1
        self._head = ""

    def format(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second:
            self._second = second
            self._head = f"[{time.strftime(DATE_FORMAT, time.localtime(second))}] "
        args: Any = record.args  # arguments of uvicorn's only call
        client, method, path, version, status = args
        line = f'{self._head}{record.levelname}:     {client} - "{method} {path} HTTP/{version}" {status}'
        return line + _PHRASES.get(status, "")


def flush() -> None:
    """Writes the waiting lines. Called when the server's event loop ends."""
    for handler in logging.getLogger("uvicorn.access").handlers:
        handler.flush()


class AccessHandler(StderrHandler):
    """Collects lines in the server's event loop, and writes them `WRITE_SECONDS` later, at the latest at exit."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record))
            if len(self._lines) == 1:
                asyncio.get_running_loop().call_later(WRITE_SECONDS, self.flush)
        except RuntimeError:  # no loop runs
            self.flush()
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        with suppress(OSError, ValueError):  # the log's pipe or stream is closed
            self.acquire()
            try:
                lines, self._lines = self._lines, []
                if lines:
                    self.stream.write("\n".join(lines) + self.terminator)
                super().flush()
            finally:
                self.release()
