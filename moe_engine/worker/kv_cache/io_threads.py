"""Threads for input and output that may hang: the process ends without waiting for them."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from moe_engine.processes.watched_thread import start_watched


class IOThreads:
    """Runs calls, which must not raise, in the order of submission. Threads start with the first call."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads, self._name = num_threads, name
        self._calls: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = SimpleQueue()
        self._started = False
        self._closed = False

    def submit(self, call: Callable[..., None], *args: Any) -> None:
        if self._closed:
            return
        if not self._started:
            self._started = True
            for i in range(self._num_threads):
                start_watched(f"{self._name}-{i}", self._run, self._failed)
        self._calls.put((call, args))

    def close(self) -> None:
        """Drops calls that have not begun; does not wait for running ones."""
        self._closed = True
        for _ in range(self._num_threads):
            self._calls.put(None)

    def _failed(self, message: str) -> None:
        """Logs the failure. The other threads continue; the wait of requests for a report is bounded."""

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            if self._closed:
                return
            call, args = item
            call(*args)
            item = args = None  # type: ignore[assignment]  # drop references while idle
