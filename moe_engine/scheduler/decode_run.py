"""Several decode steps of a scheduler taken together, while nothing else can happen: no request joins or is retracted.

The step in flight at the end may be the last one of a request, which is then known to need no further step. With one
further step the result of that one is applied too: the request ends.
Most steps of a simulation are of this kind. The result equals that of the same number of calls of `Scheduler.schedule`
and `Scheduler.update` (tests/tuning/test_simulator.py compares them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moe_engine.errors import MoeEngineError
from moe_engine.scheduler.plan_draft import StepRecord
from moe_engine.scheduler.scheduler import Scheduler
from moe_engine.scheduler.step_sums import Steps
from moe_engine.types import FinishReason, Request


def decode_run_limit(scheduler: Scheduler, lengths: Mapping[str, int], hold_prefill: bool) -> int:
    """Decode steps that `run_decodes` may take now; 0 if the next plan may be of another kind.

    Args:
        lengths: tokens of each request's answer, by rid, if it ends by its content.
        hold_prefill: of `Scheduler.schedule`, for all steps of the run.
    """
    table, kv_cache, decodes = scheduler.table, scheduler.kv_cache, scheduler.table.decodes
    if not decodes or not _only_decodes(scheduler, hold_prefill):
        return 0
    slots, page = kv_cache.slots, kv_cache.page_size
    waits = table.chunked is not None or bool(table.queue.entries)
    if slots.num_pending and ((waits and not hold_prefill) or slots.num_free < page * len(decodes)):
        return 0  # the next step cannot use these slots yet, and would evict others
    limit = min([min(lengths[r.rid], r.max_new_tokens) - len(r.output_ids) for r in decodes]) - 1
    if table.queue.entries and not hold_prefill:
        kept = scheduler.delays.kept_steps(len(decodes)) if scheduler.delays is not None else 0
        limit = min(limit, max(scheduler.backoff.steps_left(table.num_released), kept))
    return max(min(limit, _steps_with_room(scheduler)), 0)


def _steps_with_room(scheduler: Scheduler) -> int:
    """Decode steps of all running requests for which the pool has room."""
    kv_cache, page = scheduler.kv_cache, scheduler.kv_cache.page_size
    pages = (kv_cache.slots.num_free + kv_cache.tree.num_evictable) // page // len(scheduler.table.decodes)
    return pages * page - page + 1


def decodes_beyond(scheduler: Scheduler, lengths: Mapping[str, int], steps: int) -> list[Request] | None:
    """Requests that still decode behind the last step of the others, which is in flight after `steps` steps of a run;
    None if the next plan may be of another kind, or if a request may end that the scheduler does not know of.

    Args:
        lengths: of `decode_run_limit`. No prompt waits.
    """
    decodes, found = scheduler.table.decodes, list[Request]()
    for request in decodes:
        last = len(request.output_ids) + steps + 1
        if request.max_new_tokens == last:
            continue
        if lengths[request.rid] <= last:
            return None
        found.append(request)
    return found if len(found) < len(decodes) and _steps_with_room(scheduler) > steps else None


def steps_behind_ends(scheduler: Scheduler, lengths: Mapping[str, int], steps: int) -> int:
    """Decode steps that may follow `steps` steps of a run, with which some requests end (`decodes_beyond`), while the
    others get the tokens and slots of all these steps later; 0: free slots may be short, or a request ends with the
    next step."""
    left = [min(lengths[r.rid], r.max_new_tokens) - len(r.output_ids) - steps for r in scheduler.table.decodes]
    limit, page = min([count for count in left if count > 0], default=0) - 1, scheduler.kv_cache.page_size
    return limit if len(left) * (steps + limit + page) <= scheduler.kv_cache.slots.num_free else 0


def _only_decodes(scheduler: Scheduler, hold_prefill: bool) -> bool:
    """Whether the step in flight is a decode of all running requests, and no prompt, suspect or abort has a part in the
    next one."""
    table, kv_cache, flights = scheduler.table, scheduler.kv_cache, scheduler.in_flight
    if len(flights) != 1 or scheduler.speculator is not None or kv_cache.connector is not None:
        return False
    record, prefills, delays = flights[0], scheduler.prefills, scheduler.delays
    if record.prefilled or prefills.to_cache or prefills.prefill_only or scheduler.suspects or table.aborting:
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
    scheduler: Scheduler,
    taken: Steps,
    contended: Steps,
    answer: Callable[[Request, int], list[int]],
    earlier: int = 0,
    goes_on: bool = False,
) -> list[Request]:
    """Plans decode steps, and applies the results of as many steps, the oldest of which is already in flight. No step
    is planned behind the end of all requests.

    Args:
        taken: the steps, with their seconds; the scheduler's clock shows the end of the last one.
        contended: the last of them, during which requests waited.
        answer: the next tokens of a request, so many.
        earlier: steps before, of calls with `goes_on`: a later call gives the requests that have not ended the tokens
        and slots of its steps (`steps_behind_ends`).

    Returns:
        The requests that have ended, by their length (`decodes_beyond`).
    """
    table, kv_cache, steps = scheduler.table, scheduler.kv_cache, taken.count
    record, decodes, count = scheduler.in_flight[0], table.decodes, earlier + steps
    left = [request.max_new_tokens - len(request.output_ids) for request in decodes]
    rest, ended, going = decodes, list[Request](), decodes
    if min(left) <= count + 1:
        rest = [request for request, more in zip(decodes, left) if more > count]
        ended = [request for request, more in zip(decodes, left) if more <= count]
        going = [request for request, more in zip(decodes, left) if more > count + 1]
    table.sessions.decoded(len(decodes), taken, contended)
    if kv_cache.retire(record.number + steps - 1):
        scheduler.backoff.retry_now()
    changed, growing = (ended, []) if goes_on else (decodes, rest)
    needed = kv_cache.decode_need(growing, count) + (kv_cache.decode_need(ended, count - 1) if ended else 0)
    if not kv_cache.make_room(needed):
        raise MoeEngineError(f"no room for {count} decode steps; ask decode_run_limit first")
    kv_cache.extend_all(growing, count)
    for request in changed:
        request.output_ids += answer(request, count)
        request.num_computed += count
    if ended:
        kv_cache.extend_all(ended, count - 1)
        for request in ended:
            request.num_computed -= 1
    if steps:
        table.row_writes.clear()
        table.finished_rows.clear()
    planned = steps if rest else steps - 1
    record.number += steps
    kv_cache.step += planned
    scheduler.totals.generated_tokens += steps * len(decodes)
    scheduler.backoff.count_decodes(planned)
    if scheduler.delays is not None:
        scheduler.delays.decoded(planned)
    scheduler.ratio.decay(planned)
    table.decodes = going
    if ended:
        _end(scheduler, record, rest, ended)
    return ended


def _end(scheduler: Scheduler, record: StepRecord, rest: list[Request], ended: list[Request]) -> None:
    """Ends requests with the last of the results; the step in flight is that of the `rest`."""
    if rest:
        record.sampled, record.sampled_rows = rest, [request.row for request in rest]
        record.num_decodes = len(rest)
    else:
        scheduler.in_flight.clear()
    for request in ended:
        request.num_in_flight = 0
        scheduler.table.end_running(request, FinishReason("length", length=len(request.output_ids)))
    scheduler.rows_released()


def take_decode(
    scheduler: Scheduler, lengths: Mapping[str, int], answer: Callable[[Request, int], list[int]], now: float
) -> list[Request] | None:
    """Applies the result of the oldest step in flight if that is a decode with which no answer begins or ends. Returns
    its requests; None: call `Scheduler.update`. The next step may be planned, of any kind.

    Args:
        lengths: of `decode_run_limit`. answer: of `run_decodes`. now: by the scheduler's clock.
    """
    record, table, kv_cache = scheduler.in_flight[0], scheduler.table, scheduler.kv_cache
    if record.prefilled or record.depths or table.aborting or scheduler.suspects or kv_cache.connector is not None:
        return None
    if scheduler.autopilot is not None or scheduler.speculator is not None or record.jumped:
        return None
    for request in record.sampled:
        if request.row < 0 or request.first_token_at is None:
            return None
        if len(request.output_ids) + 1 >= min(request.max_new_tokens, lengths[request.rid]):
            return None
    scheduler.in_flight.popleft()
    if kv_cache.retire(record.number):
        scheduler.backoff.retry_now()
    table.sessions.stepped(record.launched, now, {}, record.num_decodes, bool(table.queue.entries))
    for request in record.sampled:
        request.num_in_flight -= 1
        request.output_ids += answer(request, 1)
    scheduler.totals.generated_tokens += len(record.sampled)
    return record.sampled
