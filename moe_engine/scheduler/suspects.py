"""Suspects: requests of a failed step, each run alone until it has passed the point of failure or fails again.

A step computes many requests, and its error does not identify one. All its requests are retracted; then each runs in
steps of its own, alternating with steps of the other requests. The request whose own step fails is the cause; the other
requests of that failure are cleared. If none fails alone, the cause was their combination or the device: a request that
was in two such failures always runs alone from then on, so that a failure cannot repeat forever.

Several requests that fail alone, one after the other, are either all bad or the device is broken. A probe decides: a
request of one token that the scheduler itself adds, and that runs before all others. The device is broken if its step
fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moe_engine.scheduler.events import RequestEvent
from moe_engine.scheduler.request_table import RequestTable
from moe_engine.types import Request, SamplingParams, Status

MAX_SHARED_FAILURES = 2
MAX_FAILURES_ALONE = 3
"""Consecutive failed steps of one request each after which a probe runs."""
PROBE_RID = "probe"
NEVER = 1 << 60


@dataclass
class _Suspect:
    """`until`: computed tokens at which the request has passed the point of failure. `failure`: its number."""

    request: Request
    until: int
    failure: int


class Suspects:
    """The suspects of one scheduler, in the order in which they run: newest work first."""

    def __init__(self) -> None:
        self._order: list[_Suspect] = []
        self._failure = 0
        self.failed_alone = 0
        """Failed steps of one request, or of none, since the last successful step."""
        self.no_room = False
        """Whether the last suspect could not be admitted."""
        self.probe: Request | None = None
        self.is_broken = False
        """Whether the step of a probe failed."""

    def __bool__(self) -> bool:
        return bool(self._order)

    def __contains__(self, request: Request) -> bool:
        return any(entry.request is request for entry in self._order)

    def add(self, requests: Iterable[tuple[Request, int, bool]]) -> None:
        """Adds the requests of a failed step: (request, tokens at which it has passed, whether it was in prefill)."""
        self._failure += 1
        self.no_room = False
        suspects = sorted(requests, key=lambda item: (not item[2], len(item[0].output_ids), -item[0].seq))
        if not suspects:
            self.failed_alone += 1
        again = {request.rid for request, _, _ in suspects}
        self._order = [entry for entry in self._order if entry.request.rid not in again]
        for request, until, _ in suspects:
            request.failed_steps += 1
            never = request.failed_steps >= MAX_SHARED_FAILURES
            self._order.append(_Suspect(request, NEVER if never else until, self._failure))

    def ready(self, table: RequestTable, hold_prefill: bool) -> Iterator[Request]:
        """Suspects that can have a step now, in order."""
        self._drop_finished()
        for entry in list(self._order):
            request, chunked = entry.request, table.chunked.request if table.chunked is not None else None
            if request.row < 0 or chunked is request:
                if not hold_prefill and chunked in (None, request):  # at most one chunked prompt at a time
                    yield request
            elif request in table.decodes:  # else its last step is in flight
                yield request

    def blocks_admission(self, table: RequestTable) -> bool:
        """Whether other requests must not be admitted: a suspect waits for the last row, or for room."""
        self._drop_finished()
        waits = any(entry.request.row < 0 for entry in self._order)
        return waits and (self.no_room or table.kv_cache.rows.num_free <= 1)

    def is_free(self, request: Request) -> bool:
        """Whether the request may share steps with others."""
        return request not in self

    def _drop_finished(self) -> None:
        self._order = [entry for entry in self._order if entry.request.status is not Status.FINISHED]

    def step_succeeded(self) -> None:
        """Resets the failure count after any successful step."""
        self.failed_alone = 0

    def passed(self, request: Request) -> None:
        """Takes in a successful step of this request alone."""
        entry = next((some for some in self._order if some.request is request), None)
        if entry is None:
            return
        self._order.remove(entry)
        if request.status is not Status.FINISHED and request.num_computed < entry.until:
            # a request that always runs alone goes to the end; others continue first
            self._order.insert(len(self._order) if entry.until == NEVER else 0, entry)

    def failed(self, request: Request) -> None:
        """Takes in a failed step of this request alone: it is the cause, the failure's other requests are cleared."""
        self.failed_alone += 1
        self.is_broken = request is self.probe
        cause = next(some for some in self._order if some.request is request)
        for entry in [some for some in self._order if some.failure == cause.failure]:
            self._order.remove(entry)
            entry.request.failed_steps -= 1

    def make_probe(self) -> Request | None:
        """A probe to add to the request table, if too many steps of one request have failed."""
        if self.failed_alone < MAX_FAILURES_ALONE or self.probe is not None:
            return None
        # a retracted request enters a full queue, at its front
        self.probe = Request(PROBE_RID, [0], SamplingParams(temperature=0.0), max_new_tokens=1, retractions=1)
        self._failure += 1
        self._order.insert(0, _Suspect(self.probe, NEVER, self._failure))
        return self.probe

    def without_probe(self, events: list[RequestEvent]) -> list[RequestEvent]:
        """Takes in and removes the events of the probe."""
        if self.probe is None:
            return events
        if self.probe.status is Status.FINISHED:
            self.probe = None
        return [event for event in events if event.rid != PROBE_RID]
