"""Several decode steps of a scheduler at once, while nothing else can happen: no request ends, joins or is retracted.

The step in flight at the end may be the last one of a request, which is then known to need no further step.
Most steps of a simulation are of this kind. The result equals that of the same number of calls of `Scheduler.schedule`
and `Scheduler.update` (tests/tuning/test_simulator.py compares them).
"""

from __future__ import annotations

from collections.abc import Callable

from moe_engine.errors import MoeEngineError
from moe_engine.scheduler.scheduler import Scheduler
from moe_engine.scheduler.step_sums import Steps
from moe_engine.types import Request


def decode_run_limit(scheduler: Scheduler, remaining: Callable[[Request], int], hold_prefill: bool) -> int:
    """Decode steps that `run_decodes` may take now; 0 if the next plan may be of another kind.

    Args:
        remaining: tokens until a request ends by its content, beyond its `output_ids`.
        hold_prefill: of `Scheduler.schedule`, for all steps of the run.
    """
    table, kv_cache, decodes = scheduler.table, scheduler.kv_cache, scheduler.table.decodes
    if not decodes or not _only_decodes(scheduler, hold_prefill):
        return 0
    slots, page = kv_cache.slots, kv_cache.page_size
    waits = table.chunked is not None or bool(table.queue.entries)
    if slots.num_pending and (waits or slots.num_free < page * len(decodes)):
        return 0  # the next step cannot use these slots yet, and would evict others
    limit = min([min(remaining(r), r.max_new_tokens - len(r.output_ids)) for r in decodes]) - 1
    if table.queue.entries and not hold_prefill:
        kept = scheduler.delays.kept_steps(len(decodes)) if scheduler.delays is not None else 0
        limit = min(limit, max(scheduler.backoff.steps_left(table.num_released), kept))
    pages = (slots.num_free + kv_cache.tree.num_evictable) // page // len(decodes)
    return max(min(limit, pages * page - page + 1), 0)


def _only_decodes(scheduler: Scheduler, hold_prefill: bool) -> bool:
    """Whether the step in flight is a decode of all running requests, and no prompt, suspect or abort has a part in the
    next one."""
    table, kv_cache, flights = scheduler.table, scheduler.kv_cache, scheduler.in_flight
    if len(flights) != 1 or scheduler.speculator is not None or kv_cache.connector is not None:
        return False
    record, prefills, delays = flights[0], scheduler.prefills, scheduler.delays
    if record.prefilled or prefills.to_cache or prefills.preempting or scheduler.suspects or table.aborting:
        return False
    if table.chunked is not None and not hold_prefill:
        return False
    if kv_cache.window_room is not None or (delays is not None and delays.delayer is not None):
        return False
    return record.sampled == table.decodes


def decodes_after(decodes: list[Request], steps: int) -> list[Request]:
    """Requests that need a further step after so many steps and the one in flight behind them."""
    return [r for r in decodes if r.max_new_tokens - len(r.output_ids) - steps > 1]


def run_decodes(
    scheduler: Scheduler, taken: Steps, contended: Steps, answer: Callable[[Request, int], list[int]]
) -> None:
    """Plans decode steps, and applies the results of as many steps, the oldest of which is already in flight.

    Args:
        taken: the steps, with their seconds; the scheduler's clock shows the end of the last one.
        contended: the last of them, during which requests waited.
        answer: the next tokens of a request, so many.
    """
    table, kv_cache, steps = scheduler.table, scheduler.kv_cache, taken.count
    record, decodes = scheduler.in_flight[0], table.decodes
    table.sessions.decoded(len(decodes), taken, contended)
    kv_cache.retire(record.number + steps - 1)
    if not kv_cache.make_room(kv_cache.decode_need(decodes, steps)):
        raise MoeEngineError(f"no room for {steps} decode steps; ask decode_run_limit first")
    for request in decodes:
        slots = kv_cache.slots.alloc(steps, request.slots[-1], len(request.slots))
        assert slots is not None
        request.slots += slots
        request.output_ids += answer(request, steps)
        request.num_computed += steps
    table.row_writes.clear()
    table.finished_rows.clear()
    record.number += steps
    kv_cache.step += steps
    scheduler.totals.generated_tokens += steps * len(decodes)
    scheduler.backoff.count_decodes(steps)
    if scheduler.delays is not None:
        scheduler.delays.decoded(steps)
    scheduler.ratio.decay(steps)
    table.decodes = decodes_after(decodes, 0)
