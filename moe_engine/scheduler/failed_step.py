"""What a step that failed leaves behind: counts go back to the step before, and nothing that it computed is shared.

The worker may have taken in a part of its plan, or none. So rows that the plan gave up are given up again, and slots
that it re-pointed are re-pointed again; both do no harm when done twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_engine.scheduler.events import RequestEvent
from moe_engine.scheduler.kv_cache_manager import token_run
from moe_engine.scheduler.plan_draft import StepRecord
from moe_engine.scheduler.prefix_keys import bigrams
from moe_engine.scheduler.request_table import RequestTable
from moe_engine.types import Request, Status


def give_up(
    book: RequestTable, records: Sequence[StepRecord], now: float
) -> tuple[list[tuple[Request, int, bool]], list[RequestEvent], int]:
    """Takes back the planned steps, the first of which failed; none is in flight any more.

    A step of a suspect alone leaves all others where they are. Else all that hold a row step back: what earlier steps
    computed stays cached for them.

    Returns:
        Of the failed step: its requests, the tokens with which each has passed the place of the failure, and whether
        its prompt was computed. The ends of requests that were to be aborted. How many stepped back.
    """
    failed, memory = records[0], book.memory
    for record in reversed(records):
        _take_back(record)
    passed = [(r, failed.prompt_spans[row][1], True) for row, r in failed.prefilled.items()]
    # what failed as a decode comes again as the end of a prompt, and then there is another decode
    passed += [(r, r.num_computed + 2, False) for r in failed.decoded]
    memory.retire(memory.step)
    events = book.end_aborting(now)
    in_rows = [request for request in book.live.values() if request.row >= 0]
    for request in in_rows:
        request.num_in_flight = request.num_maybe = 0
    if failed.alone is not None:
        return [], events, 0
    book.step_back(in_rows)
    for record in records:
        for row, request in record.prefilled.items():
            _forget(book, request, record.prompt_spans[row][0])
    return [place for place in passed if place[0].status is not Status.FINISHED], events, len(in_rows)


def resend(book: RequestTable, records: Sequence[StepRecord]) -> None:
    """Rows that the plans gave up, and slots that they re-pointed, go out again with the next plan."""
    given_up = [row for record in records for row in record.finished_rows]
    book.finished_rows = list(dict.fromkeys([*given_up, *book.finished_rows]))
    rows = {request.row for request in book.live.values()}
    writes = [write for record in records for write in record.row_writes]
    book.row_writes = [write for write in [*writes, *book.row_writes] if write.row in rows]


def _take_back(record: StepRecord) -> None:
    """Counts of computed tokens, as before the step."""
    for request in record.decoded:
        if request.row >= 0:
            request.num_computed -= 1
    for row, request in record.prefilled.items():
        if request.row >= 0:
            request.num_computed = record.prompt_spans[row][0]


def _forget(book: RequestTable, request: Request, start: int) -> None:
    """Nothing of a prompt from `start` on stays in the cache, however it came there."""
    tokens = token_run(request, 0, request.num_tokens)
    keys = bigrams(tokens) if book.config.bigram_prefixes else tokens
    book.memory.tree.forget(keys, start, request.extra_key)
