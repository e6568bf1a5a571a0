"""Prefetches into the L2 cache: when they are done, what they cost the launches meanwhile, and what they save.

Requested bytes come from memory at its rate while the launches of the stream leave it idle; a launch that reads memory
meanwhile shares it equally with them. A launch that finds a part of its weights in L2 reads the rest from memory, and
all from L2 at L2's rate. That L2 keeps what was requested until then is an assumption: it is at most half of its size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from benchmarks.step_costs.cost import Cost
from benchmarks.step_costs.hardware import Announcement, Hardware


@dataclass
class Prefetches:
    """Prefetches of one stream. Times in microseconds; bytes by the address of the weight's memory."""

    hardware: Hardware
    _last_us: float = 0.0
    _idle: float = 0.0
    """Time of the last launch, and the share of it in which the memory was idle."""
    _waiting: dict[int, float] = field(default_factory=dict)
    _arrived: dict[int, float] = field(default_factory=dict)

    @property
    def _rate(self) -> float:
        """Bytes in a microsecond."""
        return float(self.hardware["product_bytes_per_s"]) / 1e6

    def pause(self, gap: float, cost: Cost, announced: Announcement) -> None:
        """The gap before a launch. A dependent launch may request its own weights from its programs' start on: the time
        that an early start hides later than the announcement."""
        since = self._last_us if announced is Announcement.FIRST else self._hidden(announced)
        started = since - self._hidden(Announcement.FIRST)
        within = min(gap, gap + started) if cost.requests_own and announced is not Announcement.NONE else 0.0
        self._advance(gap - within)
        if within > 0:
            self._request({cost.weights: cost.requests_own})
            self._advance(max(0.0, started) * self._idle + within)

    def run(self, cost: Cost, microseconds: Callable[[Cost], float]) -> float:
        """The time of a launch, which takes `microseconds` by itself. Its requests for others are made at its start;
        from there on it reads its own weights itself."""
        self._waiting.pop(cost.weights, None)
        left = replace(cost, read=cost.read - self._arrived.pop(cost.weights, 0.0))
        if not cost.requests_last:
            self._request(cost.prefetched)
        us = microseconds(left)
        if left.read < cost.read:
            us = max(us, cost.bytes / self.hardware["l2_bytes_per_s"] * 1e6)
        if shared := min(left.bytes, sum(self._waiting.values())):
            us = max(us, (left.bytes + shared) / self._rate)
        self._advance(us - left.bytes / self._rate)
        self.ended(us, left.bytes)
        if cost.requests_last:
            self._request(cost.prefetched)
        return us

    def ended(self, us: float, used: float) -> None:
        """The last launch took `us`, and read or wrote `used` bytes of memory."""
        self._last_us, self._idle = us, max(0.0, 1 - used / self._rate / us)

    def _hidden(self, announced: Announcement) -> float:
        """The part of a gap that a dependent launch saves."""
        return float(self.hardware[Announcement.NONE] - self.hardware[announced])

    def _request(self, wanted: Mapping[int, float]) -> None:
        for address, count in wanted.items():
            self._waiting[address] = self._waiting.get(address, 0.0) + count

    def _advance(self, us: float) -> None:
        """Time passes in which the memory is idle."""
        free = max(0.0, us) * self._rate
        for address, count in list(self._waiting.items()):
            done = min(count, free)
            free -= done
            self._arrived[address] = self._arrived.get(address, 0.0) + done
            self._waiting[address] -= done
            if not self._waiting[address]:
                del self._waiting[address]
