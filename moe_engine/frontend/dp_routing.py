"""DP routing (load balancing): chooses the scheduler of a request among replicas and attention groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Load:
    """Unfinished work of a scheduler."""

    num_requests: int = 0
    num_tokens: int = 0
    """Prompt tokens plus tokens generated so far."""


class Router:
    """Chooses by `method`: ``round_robin``, ``total_requests`` (fewest) or ``total_tokens`` (fewest).

    Ties are broken round-robin, so that equal loads are spread evenly. ``auto`` is ``total_tokens``.
    """

    def __init__(self, num_endpoints: int, method: str = "auto") -> None:
        self.loads = [Load() for _ in range(num_endpoints)]
        self._method = "total_tokens" if method == "auto" else method
        self._next = 0

    def choose(self, able: Sequence[int]) -> int:
        """One of the `able` schedulers, by index."""
        count = len(self.loads)
        endpoint = min(
            able, key=lambda endpoint: (*self._weight(self.loads[endpoint]), (endpoint - self._next) % count)
        )
        self._next = (endpoint + 1) % count
        return endpoint

    def _weight(self, load: Load) -> tuple[int, ...]:
        if self._method == "total_requests":
            return (load.num_requests,)
        return (load.num_tokens, load.num_requests) if self._method == "total_tokens" else ()
