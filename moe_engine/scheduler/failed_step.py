"""Rollback of a failed step: counts return to the step before, and the tokens that it computed leave the radix cache.

The worker may have applied a part of the plan, or none. The next plan therefore repeats its row releases and row
writes; both are idempotent.
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_engine.scheduler.events import RequestEvent
from moe_engine.scheduler.kv_cache.kv_cache_manager import token_run
from moe_engine.scheduler.kv_cache.prefix_keys import bigrams
from moe_engine.scheduler.plan_draft import StepRecord
from moe_engine.scheduler.request_table import RequestTable
from moe_engine.types import Request, Status


def roll_back(
    table: RequestTable, records: Sequence[StepRecord], now: float
) -> tuple[list[tuple[Request, int, bool]], list[RequestEvent], int]:
    """Rolls back the planned steps, the first of which failed; no step is in flight.

    After a step of a suspect alone, other requests keep running. Else all running requests are retracted: results of
    earlier steps stay cached.

    Returns:
        The requests of the failed step, each with the computed tokens at which it has passed the point of failure, and
        whether it was in prefill. The final events of requests to abort. The number of retracted requests.
    """
    failed, kv_cache = records[0], table.kv_cache
    for record in reversed(records):
        _roll_back(record)
    passed = [(r, failed.prompt_spans[row][1], True) for row, r in failed.prefilled.items()]
    # a failed decode is repeated as the last token of a prefill, followed by another decode
    passed += [(r, r.num_computed + 2, False) for r in failed.decoded]
    kv_cache.retire(kv_cache.step)
    events = table.end_aborting(now)
    in_rows = [request for request in table.live.values() if request.row >= 0]
    for request in in_rows:
        request.num_in_flight = request.num_maybe = 0
    if failed.alone is not None:
        return [], events, 0
    table.retract(in_rows)
    for record in records:
        for row, request in record.prefilled.items():
            _forget(table, request, record.prompt_spans[row][0])
    return [place for place in passed if place[0].status is not Status.FINISHED], events, len(in_rows)


def resend(table: RequestTable, records: Sequence[StepRecord]) -> None:
    """Adds the finished rows and row writes of these plans to the next plan."""
    finished = [row for record in records for row in record.finished_rows]
    table.finished_rows = list(dict.fromkeys([*finished, *table.finished_rows]))
    rows = {request.row for request in table.live.values()}
    writes = [write for record in records for write in record.row_writes]
    table.row_writes = [write for write in [*writes, *table.row_writes] if write.row in rows]
    if table.lora is not None:
        table.lora.repeat([load for record in records for load in record.lora_loads])
    table.kv_cache.repeat_window_pages([page for record in records for page in record.window_pages])


def _roll_back(record: StepRecord) -> None:
    """Restores the counts of computed tokens to before the step."""
    for request in record.decoded:
        if request.row >= 0:
            request.num_computed -= 1
    for i, forced in record.jumped.items():
        if record.sampled[i].row >= 0:
            record.sampled[i].num_computed -= len(forced)
    for row, request in record.prefilled.items():
        if request.row >= 0:
            request.num_computed = record.prompt_spans[row][0]


def _forget(table: RequestTable, request: Request, start: int) -> None:
    """Removes a prompt's tokens from `start` on from the radix cache, regardless of which request inserted them."""
    tokens = token_run(request, 0, request.num_tokens)
    keys = bigrams(tokens) if table.config.bigram_prefixes else tokens
    table.kv_cache.tree.forget(keys, start, request.namespace)
