"""Server stop: from inside after the engine died, or by SIGTERM before the server can drain."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StopSwitch:
    """Passed to the HTTP server; `stop_after` stops it like SIGTERM, after a delay to respond to clients."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None

    def connect(self, stop: Callable[[], None]) -> None:
        """Called by the server with its stop function."""
        self._stop = stop

    def stop_after(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._fire)

    def _fire(self) -> None:
        if self._stop is not None:
            self._stop()


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """SIGTERM exits with code 0 through the `finally` clauses, until the server handles it by draining."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
