"""Common base of the transfer threads of both sides: sockets within the process, start, end, waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq

from moe_engine.processes.watched_thread import start_watched
from moe_engine.scheduler.tiers.transfer_link import TransferLink

POLL_MS = 200
BUSY_POLL_MS = 1
"""Poll interval while copies or writes are in progress: they wake no socket."""
END = b"end"
"""The last message to a thread, which then closes the socket that it came from."""


class TransferThread:
    """A thread that takes the commands of a `TransferLink` and reports to it. Subclasses call `_start` last.

    Args:
        wake_core: ends a wait of the core's loop.
        max_sockets: of the thread's ZeroMQ context, its own two included; 0: ZeroMQ's default.
    """

    def __init__(self, link: TransferLink, wake_core: Callable[[], None], max_sockets: int = 0) -> None:
        self._link, self._wake_core = link, wake_core
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        if max_sockets:
            self._context.set(zmq.MAX_SOCKETS, max_sockets)
        self._inner = self._context.socket(zmq.PULL)
        self._inner.bind("inproc://wake")
        self._poller = zmq.Poller()
        self._poller.register(self._inner, zmq.POLLIN)
        waker = self._new_waker()
        link.wake = lambda: waker.send(b"")
        self._end_thread: Callable[[], None] = lambda: waker.send(END)
        self._ready: set[Any] = set()
        """Sockets that had a message at the last poll."""
        self._closing = False

    def _new_waker(self) -> zmq.Socket[bytes]:
        """Its messages end a wait of the thread; one for each thread that sends them."""
        waker = self._context.socket(zmq.PUSH)
        waker.connect("inproc://wake")
        return waker

    def close(self) -> None:
        """Waits for the end of the thread, which ends all transfers with a message to their peers."""
        if not self._link.broken:
            self._end_thread()
        self._thread.join(timeout=5)

    def _start(self) -> None:
        self._thread = start_watched("KV transfers", self._run, self._broken)

    def _broken(self, message: str) -> None:
        self._link.broken = message
        self._wake_core()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._ready = {socket for socket, _ in self._poller.poll(BUSY_POLL_MS if self._is_busy() else POLL_MS)}
                while self._inner.poll(0):
                    self._closing |= self._inner.recv() == END
                self._turn()
        finally:
            self._leave()
            self._context.destroy(linger=500)

    def _report(self, *values: Any) -> None:
        self._link.reports.append(values)
        self._wake_core()

    # -- of the side, which registers its sockets at `_poller`

    def _is_busy(self) -> bool:
        return False

    def _turn(self) -> None:
        """Handles everything that has arrived."""
        raise NotImplementedError

    def _leave(self) -> None:
        """The server stops: ends all transfers."""
