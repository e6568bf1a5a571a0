"""Requests of a step that failed: each runs alone until it has passed the place of the failure, or fails there again.

A step computes many requests at once, and its error names none. So all of them step back, and their next steps hold one
of them each, between steps of the others. The request whose own step fails is the cause; the others of that failure are
free again. Where none fails alone, the failure lay in their meeting or in the device: a request that was in two such
failures has its steps to itself from then on, so that no failure repeats without end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moe_engine.scheduler.request_table import RequestTable
from moe_engine.types import Request, Status

MAX_SHARED_FAILURES = 2
MAX_FAILURES_ALONE = 3
"""Steps of one request each that fail without one that works between them: then it is not the requests."""
NEVER = 1 << 60


@dataclass
class _Suspicion:
    """`until`: tokens with which the request has passed the place of the failure. `failure`: its number."""

    request: Request
    until: int
    failure: int


class Suspects:
    """The suspects of one scheduler, in the order in which they are tried: the newest work first."""

    def __init__(self) -> None:
        self._order: list[_Suspicion] = []
        self._failure = 0
        self.failed_alone = 0
        """Failed steps of one request, or of none, since the last step that worked."""
        self.no_room = False
        """A suspect could not be admitted."""

    def __bool__(self) -> bool:
        return bool(self._order)

    def __contains__(self, request: Request) -> bool:
        return any(suspicion.request is request for suspicion in self._order)

    def accuse(self, requests: Iterable[tuple[Request, int, bool]]) -> None:
        """Adds the requests of a failed step: (request, tokens to pass, whether it computed its prompt)."""
        self._failure += 1
        self.no_room = False
        accused = sorted(requests, key=lambda item: (not item[2], len(item[0].output_ids), -item[0].seq))
        if self.failed_alone + 1 >= MAX_FAILURES_ALONE:  # the oldest have worked for longest: they show what is wrong
            accused.reverse()
        if not accused:
            self.failed_alone += 1
        again = {request.rid for request, _, _ in accused}
        self._order = [suspicion for suspicion in self._order if suspicion.request.rid not in again]
        for request, until, _ in accused:
            request.failed_steps += 1
            never = request.failed_steps >= MAX_SHARED_FAILURES
            self._order.append(_Suspicion(request, NEVER if never else until, self._failure))

    def ready(self, book: RequestTable, hold_prefill: bool) -> Iterator[Request]:
        """Those that can have a step now, the first to be tried first."""
        self._forget_ended()
        for suspicion in list(self._order):
            request, chunked = suspicion.request, book.chunked.request if book.chunked is not None else None
            if request.row < 0 or chunked is request:
                if not hold_prefill and chunked in (None, request):  # there is one chunked prompt at a time
                    yield request
            elif request in book.decodes:  # else its last step is in flight
                yield request

    def keep_out(self, book: RequestTable) -> bool:
        """Whether no other request may be admitted: a suspect waits for the last row, or for room."""
        self._forget_ended()
        waits = any(suspicion.request.row < 0 for suspicion in self._order)
        return waits and (self.no_room or book.memory.rows.num_free <= 1)

    def is_free(self, request: Request) -> bool:
        """Whether it may run with others."""
        return request not in self

    def _forget_ended(self) -> None:
        self._order = [suspicion for suspicion in self._order if suspicion.request.status is not Status.FINISHED]

    def worked(self) -> None:
        """Any step has worked."""
        self.failed_alone = 0

    def passed(self, request: Request) -> None:
        """A step of this request alone has worked."""
        suspicion = next((some for some in self._order if some.request is request), None)
        if suspicion is None:
            return
        self._order.remove(suspicion)
        if request.status is not Status.FINISHED and request.num_computed < suspicion.until:
            # one that is never free lets the others have their turn; the rest go on where they are
            self._order.insert(len(self._order) if suspicion.until == NEVER else 0, suspicion)

    def failed(self, request: Request) -> None:
        """A step of this request alone failed: the failure is explained, and its other requests are free."""
        self.failed_alone += 1
        cause = next(some for some in self._order if some.request is request)
        for suspicion in [some for some in self._order if some.failure == cause.failure]:
            self._order.remove(suspicion)
            suspicion.request.failed_steps -= 1
