"""How a server ends: told from inside because its engine is gone, or by SIGTERM before there is anything to drain."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StopSwitch:
    """Handed to the HTTP server; `stop_after` makes it end as SIGTERM would, after a while to answer clients."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None

    def connect(self, stop: Callable[[], None]) -> None:
        """The server tells how to end it."""
        self._stop = stop

    def stop_after(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._fire)

    def _fire(self) -> None:
        if self._stop is not None:
            self._stop()


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """SIGTERM ends the program well, with code 0 and through its `finally` clauses, until the server drains on it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
