"""Several steps of a scheduler taken together, while one long prompt is computed in equal chunks: each step is a chunk,
or a decode of all running requests, as the turns of the attention groups have it.

The last chunk samples and lets other prompts join. While none waits, the run has it too, with the first decode step
behind it; otherwise the run ends before it. The result equals that of the same steps by `Scheduler.schedule` and
`Scheduler.update` (tests/tuning/test_simulator.py compares them); the radix cache gets the chunks at the end of the
run, because no other prompt is matched before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moe_engine.errors import MoeEngineError
from moe_engine.scheduler.admission import growth_of
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.plan_draft import StepRecord
from moe_engine.scheduler.scheduler import Scheduler
from moe_engine.scheduler.step_sums import Steps, between
from moe_engine.scheduler.waiting_queue import Waiting
from moe_engine.types import Request

UNLIMITED = NEVER = 1 << 60
NONE = Steps()


# Not frozen: constructors of frozen classes take three times as long.
@dataclass(slots=True)
class ChunkLimits:
    """Steps that a run may take from now on.

    Attributes:
        size: tokens of each chunk. start: first token of the next chunk.
        chunks, decodes: max number of steps of each kind.
        in_a_row: chunks since the last decode.
        begins_with_chunk: whether the step in flight is a chunk of this prompt; else it is a decode.
        last: tokens of the last chunk, which may follow the others and one decode step behind it; 0: the run ends
        before.
    """

    size: int
    start: int
    chunks: int
    decodes: int
    in_a_row: int
    begins_with_chunk: bool
    last: int = 0


@dataclass(slots=True)
class ChunkTimes:
    """Times of a chunk whose result has been applied, in seconds of the scheduler's clock.

    Attributes:
        launched: time of planning; `ended`: of the result; `began`: of the result before.
        before, after: sums of all steps before and after it.
    """

    launched: float
    began: float
    ended: float
    before: Steps
    after: Steps


@dataclass(slots=True)
class ChunkRun:
    """Steps of a run whose results have been applied, the oldest of which was in flight before.

    Attributes:
        size: tokens of a chunk. decodes: number of decode steps.
        chunks: times of the chunks; the decode steps before and between them are in the sums of their times.
        begin, end: sums of all steps at the begin and the end of the run.
        contended: sums from which on requests waited; None: none waited.
        in_flight: kind of the step in flight: "decode", "chunk", "last" or "" without one.
        launched: time of planning of that step.
        in_a_row: chunks since the last decode.
        last_size: tokens of the last chunk, if it is in flight or its result has been applied. last: its times in the
        second case; a decode step is in flight then.
    """

    size: int
    decodes: int
    chunks: Sequence[ChunkTimes]
    begin: Steps
    end: Steps
    contended: Steps | None
    in_flight: str
    launched: float
    in_a_row: int
    last_size: int = 0
    last: ChunkTimes | None = None


def has_chunk_runs(config: SchedulerConfig) -> bool:
    """Whether a scheduler of this kind can take such runs: a plan has prompts or decodes, and a chunk changes nothing
    but the slots of its request."""
    return not (
        config.enable_mixed_chunk
        or config.speculation is not None
        or config.host_tier_tokens
        or config.window
        or config.num_snapshots
        or config.lora_slots
        or config.jump_forward
        or config.autopilot
        or config.delayer is not None
        or config.kv_events
        or config.radix_eviction_policy != "lru"
    )


def chunk_limits(scheduler: Scheduler, lengths: Mapping[str, int]) -> ChunkLimits | None:
    """The run that may begin with the step in flight; None if the next plan may be of another kind. The scheduler is
    one of several groups, and `has_chunk_runs`.

    Args:
        lengths: of `decode_run_limit`.
    """
    table, entry = scheduler.table, scheduler.table.chunked
    if entry is None or not _is_of_run(scheduler, entry.request, lengths):
        return None
    if scheduler.in_flight[0].prefilled and scheduler.in_flight[0].sampled:
        scheduler.prefills.cache_prefills()  # as the next plan does: its prompts may have tokens in common
    request, decodes, kv_cache = entry.request, table.decodes, scheduler.kv_cache
    most = table.settings.chunk_beside(len(decodes))
    size = 0 if most is None else scheduler.config.floor_page(most)
    if most is None or size <= 0 or not _has_slots(scheduler, entry, size):
        return None
    reserved = scheduler.ratio.value * growth_of(decodes, scheduler.config.clip_max_new_tokens)
    room = int(min(kv_cache.slots.num_free + kv_cache.tree.num_evictable, kv_cache.available - reserved)) - size
    left = len(entry.tokens) - request.num_computed
    before_last = max((left - most - 1) // size + 1, 0)
    chunks = max(min(before_last, room // (2 if decodes else 1) // size), 0)
    limit, chunk_first, page = UNLIMITED, bool(scheduler.in_flight[0].prefilled), kv_cache.page_size
    last = left - chunks * size
    behind = last + 2 * page * (len(decodes) + 1)
    goes_on = min(lengths[request.rid], request.max_new_tokens) - len(request.output_ids) > 2
    if chunks < before_last or table.queue.entries or not goes_on or room < chunks * size + behind:
        last = behind = 0
    if decodes:
        limit = min([min(lengths[r.rid], r.max_new_tokens - 1) - len(r.output_ids) - r.num_in_flight for r in decodes])
        limit = min(limit, ((room - chunks * size - behind) // page // len(decodes)) * page - page + 1)
    elif not (chunks or last):
        return None
    in_a_row = scheduler.backoff.prefills_in_a_row
    return ChunkLimits(size, request.num_computed, chunks, max(limit, 0), in_a_row, chunk_first, last)


def _is_of_run(scheduler: Scheduler, request: Request, lengths: Mapping[str, int]) -> bool:
    """Whether the step in flight is a chunk of this prompt, with others only the last chunk of prompts that decode
    next, or a decode of all running requests, and no suspect or abort has a part in the next one."""
    table, flights, prefills = scheduler.table, scheduler.in_flight, scheduler.prefills
    if len(flights) != 1 or table.aborting or scheduler.suspects or prefills.prefill_only:
        return False
    record, decodes = flights[0], table.decodes
    if record.prefilled:
        if record.ended or request.row not in record.prefilled or len(record.prefilled) > len(record.sampled) + 1:
            return False
        return all(min(lengths[r.rid], r.max_new_tokens) - len(r.output_ids) > 1 for r in record.sampled)
    return bool(decodes) and record.sampled == decodes and not prefills.to_cache


def _has_slots(scheduler: Scheduler, entry: Waiting, size: int) -> bool:
    """Whether the next step, a chunk or a decode, takes free slots."""
    kv_cache, request = scheduler.kv_cache, entry.request
    slots, tree = kv_cache.slots, kv_cache.tree
    needed = kv_cache.page_size * len(scheduler.table.decodes) + size
    if (slots.num_pending or kv_cache.rows.num_pending) and slots.num_free < needed:
        return False  # it cannot use the pending slots yet, and would evict others
    known = tree.peek(entry.prefix_keys, entry.limit, request.namespace, request.tree_node).length
    return known <= request.num_in_tree  # otherwise it takes the slots of a prompt of the same step with these tokens


def run_chunks(scheduler: Scheduler, run: ChunkRun, answer: Callable[[Request, int], list[int]]) -> None:
    """Plans the steps of a run and applies their results, except that of the last step if it is still in flight.

    Args:
        answer: the next tokens of a request, so many.
    """
    table, kv_cache, entry = scheduler.table, scheduler.kv_cache, scheduler.table.chunked
    assert entry is not None
    record, decodes, prompt = scheduler.in_flight[0], table.decodes, entry.request
    _observe(scheduler, run)
    began_with_chunk = bool(record.prefilled)
    num_decodes = run.decodes + (run.in_flight == "decode") - (not began_with_chunk)
    num_chunks = len(run.chunks) + (run.in_flight == "chunk") - began_with_chunk
    results = run.decodes + len(run.chunks) + (run.last is not None)
    if kv_cache.retire(record.number + results - 1):
        scheduler.backoff.retry_now()
    added = num_chunks * run.size + run.last_size
    needed = kv_cache.decode_need(decodes, num_decodes) + kv_cache.reserve_need(
        [prompt], [added + (run.last is not None)]
    )
    if not kv_cache.make_room(needed):
        raise MoeEngineError(f"no room for {num_chunks} chunks and {num_decodes} decodes; ask chunk_limits first")
    kv_cache.extend_all(decodes, num_decodes)
    for request in decodes:
        request.output_ids += answer(request, run.decodes)
        request.num_computed += num_decodes
        request.num_in_flight = int(run.in_flight == "decode")
    if added:
        kv_cache.extend(prompt, added)
        prompt.num_computed += added
        scheduler.prefills.to_cache = [prompt]
        scheduler.totals.hit_rate = 0.0
    if added or num_decodes:
        table.row_writes.clear()
        table.finished_rows.clear()
    kv_cache.step += num_decodes + num_chunks + (run.last_size > 0)
    scheduler.totals.generated_tokens += run.decodes * len(decodes)
    if run.last_size:
        _complete(scheduler, run, prompt, answer)
    scheduler.backoff.count_run(num_decodes, run.in_a_row, left_waiting=not run.last_size)
    scheduler.ratio.decay(num_decodes)
    _replace_record(scheduler, run, prompt, record.number + results)


def _complete(
    scheduler: Scheduler, run: ChunkRun, prompt: Request, answer: Callable[[Request, int], list[int]]
) -> None:
    """The last chunk is planned; with its result the prompt has its first token, and decodes in the step in flight."""
    table, kv_cache = scheduler.table, scheduler.kv_cache
    table.chunked = None
    table.decodes.append(prompt)
    prompt.num_in_flight = 1
    if run.last is None:
        return
    scheduler.prefills.cache_prefills()
    table.row_writes.clear()
    begin_answers(scheduler, [prompt], run.last.ended, answer)
    kv_cache.extend(prompt, 1)
    prompt.num_computed += 1


def begin_answers(
    scheduler: Scheduler, requests: Sequence[Request], now: float, answer: Callable[[Request, int], list[int]]
) -> None:
    """Applies the first tokens of answers, whose last chunk may be in the step of the first one of the run's prompt."""
    for request in requests:
        if request.first_token_at is None:
            request.first_token_at = now
        request.output_ids += answer(request, 1)
    scheduler.totals.generated_tokens += len(requests)


def _observe(scheduler: Scheduler, run: ChunkRun) -> None:
    """Reports the times of the steps to the hold of sessions, in their order."""
    sessions, running = scheduler.table.sessions, len(scheduler.table.decodes)
    if sessions.is_off:
        return
    times, mark, waits = sessions.times, run.begin, NEVER if run.contended is None else run.contended.count
    spans, contended, chunks = list[tuple[float, float]](), 0, run.chunks
    if chunks and (first := scheduler.in_flight[0].prompt_spans):  # its chunk may share the step
        size, mark = sum([end - start for start, end in first.values()]), chunks[0].after
        times.add(chunks[0].launched, chunks[0].ended, size, 0, waits < mark.count)
        chunks = chunks[1:]
    for chunk in chunks:
        if running and chunk.before.count > mark.count:
            times.add_prompts(run.size, spans, contended)
            spans, contended = [], 0
            steps = between(mark, chunk.before)
            times.add_decodes(running, steps, _part(run, mark, chunk.before, steps), chunk.began)
        spans.append((chunk.launched, chunk.ended))
        contended += waits < chunk.after.count
        mark = chunk.after
    times.add_prompts(run.size, spans, contended)
    if run.last is None:
        if running and run.end.count > mark.count:
            steps = between(mark, run.end)
            sessions.decoded(running, steps, _part(run, mark, run.end, steps))
        return
    if running and run.last.before.count > mark.count:
        steps = between(mark, run.last.before)
        times.add_decodes(running, steps, _part(run, mark, run.last.before, steps), run.last.began)
    times.add(run.last.launched, run.last.ended, run.last_size, 0, waits < run.last.after.count)


def _part(run: ChunkRun, begin: Steps, end: Steps, steps: Steps) -> Steps:
    """The contended steps among those from `begin` to `end`."""
    if run.contended is None or run.contended.count >= end.count:
        return NONE
    return between(run.contended, end) if run.contended.count > begin.count else steps


def _replace_record(scheduler: Scheduler, run: ChunkRun, prompt: Request, number: int) -> None:
    """The step in flight at the end of the run."""
    flights, decodes = scheduler.in_flight, scheduler.table.decodes
    flights.clear()
    if run.in_flight == "decode":
        rows = [request.row for request in decodes]
        record = StepRecord(number, decodes.copy(), rows, num_decodes=len(decodes), launched=run.launched)
        flights.append(record)
    elif run.in_flight in ("chunk", "last"):
        row, samples = prompt.row, run.in_flight == "last"
        size = run.last_size if samples else run.size
        start = prompt.num_computed - size
        record = StepRecord(number, [prompt] * samples, [row] * samples, {row: prompt}, launched=run.launched)
        record.prompt_spans = {row: (start, prompt.num_computed)}
        flights.append(record)
