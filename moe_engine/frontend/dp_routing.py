"""Which scheduler gets a request, where there are several: replicas, and attention groups of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Load:
    """What a scheduler was given and has not finished."""

    num_requests: int = 0
    num_tokens: int = 0
    """Prompt tokens and those generated so far."""


class Router:
    """Chooses by `method`: ``round_robin``, ``total_requests`` (fewest) or ``total_tokens`` (fewest).

    Ties go to the one whose turn it is, so that equal loads share evenly. ``auto`` is ``total_tokens``.
    """

    def __init__(self, num_lanes: int, method: str = "auto") -> None:
        self.loads = [Load() for _ in range(num_lanes)]
        self._method = "total_tokens" if method == "auto" else method
        self._next = 0

    def choose(self, able: Sequence[int]) -> int:
        """One of the `able` lanes."""
        count = len(self.loads)
        lane = min(able, key=lambda lane: (*self._weight(self.loads[lane]), (lane - self._next) % count))
        self._next = (lane + 1) % count
        return lane

    def _weight(self, load: Load) -> tuple[int, ...]:
        if self._method == "total_requests":
            return (load.num_requests,)
        return (load.num_tokens, load.num_requests) if self._method == "total_tokens" else ()
