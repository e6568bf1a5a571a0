"""Server stop: from inside after the engine died, or by SIGTERM before the server can drain."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from moe_engine.processes.stop_signals import stop_signals

INTERRUPTED, STOPPED = 130, 1
"""Exit codes after a second signal: SIGINT, SIGTERM."""


class StopSwitch:
    """Passed to the HTTP server; `stop_after` stops it from inside."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] = lambda: None
        self._disconnect: Callable[[Exception], None] = lambda error: None

    def connect(self, stop: Callable[[], None], disconnect: Callable[[Exception], None]) -> None:
        """Called by the server with its functions to drain, and to close all connections because of an error."""
        self._stop, self._disconnect = stop, disconnect

    def stop_after(self, seconds: float, drain_seconds: float, error: Exception) -> None:
        """Stops the server like SIGTERM, after a delay to respond to clients. The drain has a limit, which ends it for
        clients that read or send too slowly, and for large bodies: those without a response get the error."""
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, lambda: self._stop())
        loop.call_later(seconds + drain_seconds, lambda: self._disconnect(error))


class SecondSignal:
    """What the signal after the first SIGINT or SIGTERM does: it kills the processes that the drain waits for. The
    server then exits without a wait; a third signal ends this process immediately.

    Args:
        kill: kills the engine's processes; called in a signal handler.
    """

    def __init__(self, kill: Callable[[], None]) -> None:
        self._kill = kill
        self._number = 0

    @property
    def has_come(self) -> bool:
        return self._number > 0

    def take(self, number: int) -> None:
        """Called with the second signal, and with further ones."""
        if self.has_come:
            self.exit()
        self._number = number
        self._kill()

    def exit(self) -> NoReturn:
        """Ends this process. Threads that still read or compute for requests are not waited for."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED if self._number == signal.SIGINT else STOPPED)


@contextmanager
def stop_signals_exit() -> Iterator[None]:
    """SIGTERM and SIGHUP exit with code 0 through the `finally` clauses, until the server handles them by draining."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in stop_signals() if number != signal.SIGINT]
    before = {number: signal.signal(number, lambda *_: sys.exit(0)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
