"""Which request may run by evicting the held KV of sessions, so that no request waits without end."""

from __future__ import annotations

from moe_engine.scheduler.waiting_queue import Waiting

ROTATION = 0.025
"""Max share of the time for recomputing KV that was evicted so that another session can run: half of the allowed loss
of throughput (0.05)."""


class Rotation:
    """The request that was passed over first runs once a budget covers the recomputation that it causes. The budget
    grows by `ROTATION` of the time while requests are passed over, at most to that cost. Time in which nothing runs is
    lost like that of a recomputation, and counts in full: on an idle engine a request waits no longer than it costs."""

    def __init__(self) -> None:
        self._passed: dict[Waiting, None] = {}
        """Requests that were passed over, the longest waiting first."""
        self._budget, self._grown_at = 0.0, 0.0
        """Seconds of recomputation; time of the last increase."""
        self._was_idle = False
        self._running: tuple[Waiting, float] | None = None
        """The request that may run, and the seconds of recomputation that it causes."""

    def pass_over(self, entry: Waiting, now: float) -> bool:
        """Records that a request must wait for held sessions; whether it is the one that may rotate (`affords`)."""
        if not self._passed:
            self._grown_at = now
        self._passed.setdefault(entry)
        return entry is self.first()

    def affords(self, entry: Waiting, cost: float, now: float, idle: bool = False) -> bool:
        """Whether the budget covers `cost` seconds of recomputation; it pays once the request is admitted. `idle`: no
        request runs."""
        share = 1.0 if idle and self._was_idle else ROTATION
        self._budget = min(self._budget + (now - self._grown_at) * share, cost)
        self._grown_at, self._was_idle = now, idle
        if self._budget < cost:
            return False
        self._running = entry, cost
        return True

    def admitted(self, entry: Waiting) -> None:
        self._passed.pop(entry, None)
        if self._running is not None and entry is self._running[0]:
            self._budget -= self._running[1]
            self._running = None

    def first(self) -> Waiting | None:
        """The request that was passed over first and still waits."""
        while self._passed:
            first = next(iter(self._passed))
            if first.is_queued:
                return first
            del self._passed[first]
        return None
