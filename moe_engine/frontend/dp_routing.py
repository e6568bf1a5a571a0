"""DP routing (load balancing): chooses the scheduler of a request among replicas and attention groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter


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
        tokens = "num_tokens", "num_requests"
        weights = {"round_robin": (), "total_requests": ("num_requests",), "total_tokens": tokens, "auto": tokens}
        self._weights = tuple(map(attrgetter, weights[method]))
        self._next = 0

    def choose(self, able: Sequence[int]) -> int:
        """One of the `able` schedulers, by index."""
        loads, count = self.loads, len(self.loads)
        for weight in self._weights:
            weights = [weight(loads[endpoint]) for endpoint in able]
            least = min(weights)
            able = [endpoint for endpoint, found in zip(able, weights) if found == least]
            if len(able) == 1:
                break
        endpoint = min(able, key=lambda endpoint: (endpoint - self._next) % count)
        self._next = (endpoint + 1) % count
        return endpoint
