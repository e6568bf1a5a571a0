"""Time limits of requests: in the waiting queue (`--request-waiting-timeout`), and from the first step on
(`--request-running-timeout`). SGLang has them as SGLANG_REQ_WAITING_TIMEOUT and SGLANG_REQ_RUNNING_TIMEOUT.

A retracted request keeps the clock of its first step: while it waits again, the running limit applies. Pauses of
generation count as neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import TYPE_CHECKING

from moe_engine.types import FinishReason, Request

if TYPE_CHECKING:
    from moe_engine.scheduler.run_settings import RunSettings

LEAST_PAUSE = 0.01
"""Min seconds between two scans of the requests."""


class RequestTimeouts:
    """Finds the requests over a limit.

    A scan returns when the next request may be over its limit; until then a call costs one comparison. A request that
    arrives, or has its first step, after a scan is over its limit no earlier than the shortest limit after that scan.
    """

    def __init__(self, limits: RunSettings, clock: Callable[[], float]) -> None:
        """
        Args:
            clock: in seconds; the clock of `Request.queued_at` and `Request.first_scheduled`.
        """
        waiting, running = limits.request_waiting_timeout, limits.request_running_timeout
        self._waiting = inf if waiting is None else waiting
        self._running = inf if running is None else running
        self._clock = clock
        self._next_scan = 0.0

    @classmethod
    def of(cls, limits: RunSettings, clock: Callable[[], float]) -> RequestTimeouts | None:
        """None without limits."""
        values = (limits.request_waiting_timeout, limits.request_running_timeout)
        return None if values == (None, None) else cls(limits, clock)

    def overdue(
        self, live: Iterable[Request], paused_since: float | None = None
    ) -> list[tuple[bool, list[str], FinishReason]]:
        """Requests over a limit that no abort has reached yet: (whether it is that of waiting, rids, reason) for each
        limit.

        Args:
            live: all requests, waiting and running.
            paused_since: begin of the pause of generation that lasts.
        """
        now = self._clock()
        if now < self._next_scan:
            return []
        waited: list[str] = []
        ran: list[str] = []
        earliest = now + min(self._waiting, self._running)
        for request in live:
            if request.to_abort is not None:
                continue
            waits = request.first_scheduled is None
            deadline = request.clock_began + (self._waiting if waits else self._running) + request.paused_seconds
            if paused_since is not None:
                deadline += now - max(paused_since, request.clock_began)
            if deadline <= now:
                (waited if waits else ran).append(request.rid)
            else:
                earliest = min(earliest, deadline)
        self._next_scan = max(earliest, now + LEAST_PAUSE)
        found = ((True, waited, _waited(self._waiting)), (False, ran, _ran(self._running)))
        return [one for one in found if one[1]]


def _waited(limit: float) -> FinishReason:
    message = (
        f"the request waited in the queue for longer than --request-waiting-timeout ({limit:g} s); send it again "
        "later, or start the server with a higher limit"
    )
    return FinishReason("abort", message=message, status_code=503)


def _ran(limit: float) -> FinishReason:
    message = (
        f"the request ran for longer than --request-running-timeout ({limit:g} s); ask for fewer tokens, or start "
        "the server with a higher limit"
    )
    return FinishReason("abort", message=message, status_code=503)
