"""Starts a few requests in each turn of the event loop, so that a burst of requests holds up no running stream.

A turn of the loop runs all ready tasks. When hundreds of requests arrive together, each with some hundred
microseconds of checks and tokenization, one turn would take as long as all of them, and the tokens of running streams
would wait for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

PER_TURN = 4


class StartQueue:
    """Starts in order of arrival, at most `PER_TURN` in a turn of the loop; immediately while there are fewer."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._num_started = 0
        """In this turn."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, start: Callable[[], object]) -> None:
        if not self._num_started:
            asyncio.get_running_loop().call_soon(self._next_turn)
        if self._num_started < PER_TURN and not self._waiting:
            self._num_started += 1
            start()
        else:
            self._waiting.append(start)

    def _next_turn(self) -> None:
        self._num_started = min(PER_TURN, len(self._waiting))
        if self._num_started:
            asyncio.get_running_loop().call_soon(self._next_turn)
        for _ in range(self._num_started):
            self._waiting.popleft()()
