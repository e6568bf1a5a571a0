"""One scheduler of a simulation, and the answers of the model that it drives.

The scheduler is the production one, with its radix cache, admission, retraction and draft depth; only the results of
its steps are generated here: every request gets the tokens of its answer, and drafts are accepted by chance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from moe_engine.errors import InputError
from moe_engine.scheduler.chunk_run import (
    ChunkLimits,
    ChunkRun,
    ChunkTimes,
    begin_answers,
    chunk_limits,
    has_chunk_runs,
    run_chunks,
)
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.decode_run import (
    decode_run_limit,
    decodes_after,
    decodes_beyond,
    run_decodes,
    steps_behind_ends,
    take_decode,
)
from moe_engine.scheduler.events import RequestEvent
from moe_engine.scheduler.scheduler import NeedsResult, Scheduler
from moe_engine.scheduler.step_sums import Steps, StepSums
from moe_engine.tuning.costs.step_cost import StepCost, StepShape
from moe_engine.tuning.simulator.rank_log import GroupLog
from moe_engine.tuning.simulator.recorder import Running
from moe_engine.tuning.simulator.runs import Runs
from moe_engine.tuning.simulator.workload import answer_tokens
from moe_engine.types import KVOps, Request, SamplingParams, StepPlan, StepResult

EOS = 0
END_IDS = frozenset((EOS,))
SAMPLING = SamplingParams(max_new_tokens=None)


class Group:
    """A scheduler with its requests.

    Attributes:
        load_tokens: prompt and answer tokens of its requests, without those of a run. load_uncomputed: prompt tokens
        without known KV of requests that have no token yet.
        run_rows: requests that decode in its run; 0: none, or it is in no run. run_from: the step count of the replica
        at the begin of its run, or at the newest end of a request in it, plus the chunks in it. earlier: steps of the
        run before that, whose tokens and slots its requests get when it ends. chunk_size: of a run with chunks; 0: a
        run without.
        chunk_times: of the chunks of its run whose results have been applied.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Callable[[], float],
        acceptance: Sequence[float],
        seed: int,
        log: GroupLog | None = None,
    ) -> None:
        self.scheduler = Scheduler(replace(config, vocab_size=None), clock)  # answers consist of generated tokens
        self.scheduler.keeps_facts = log is not None
        self._log = log
        self.scheduler.kv_cache.slots.pages.share()
        self.running: dict[str, Running] = {}
        self._lengths: dict[str, int] = {}
        """Tokens of the answers."""
        self.load_tokens = self.load_uncomputed = self.run_rows = self.run_from = self.earlier = self.chunk_size = 0
        self.chunk_times: list[ChunkTimes] = []
        self._has_chunk_runs = has_chunk_runs(config)
        self._run_began: Steps = Steps()
        self._contended: Steps | None = None
        """Begin of the steps of its run during which requests waited."""
        self._acceptance = list(acceptance)
        self._rng = random.Random(seed)

    # -- requests

    def add(self, running: Running, rid: str, output_ids: Sequence[int] = ()) -> str | None:
        """Queues a request; `output_ids`: generated before, on a lost rank. Returns the reason if it is refused, or
        None."""
        arrival = running.arrival
        request = Request(
            rid,
            arrival.prompt_ids,
            SAMPLING,
            arrival.max_tokens,
            END_IDS,
            output_ids=list(output_ids),
            retractions=1 if output_ids else 0,
        )
        if self._log is not None and self.is_idle:
            self._log.reporter.idle()
        try:
            self.scheduler.add(request)
        except InputError as error:
            return str(error)
        self.running[rid], self._lengths[rid], running.request = running, arrival.output_len, request
        running.answer = answer_tokens(arrival.answer_ids, 0, arrival.output_len + 1)
        self.load_tokens += len(arrival.prompt_ids) + len(output_ids)
        self.load_uncomputed += running.uncomputed
        return None

    def remove(self, rid: str) -> None:
        """Removes a request that has ended."""
        running = self.running.pop(rid)
        del self._lengths[rid]
        self.computed(running)
        request = running.request
        if request is not None:  # its answer may be shorter than that of its arrival: the pool limits it
            self.load_tokens -= len(request.prompt_ids) + len(request.output_ids)

    def computed(self, running: Running) -> None:
        """The prompt of a request has been computed."""
        self.load_uncomputed -= running.uncomputed
        running.uncomputed = 0

    @property
    def is_idle(self) -> bool:
        """Whether it has no request and no step."""
        return not self.running and not self.scheduler.num_in_flight

    @property
    def only_waits(self) -> bool:
        """Whether it has no step while prompts are held back: nothing decodes."""
        scheduler = self.scheduler
        return scheduler.num_waiting > 0 and not scheduler.table.decodes

    # -- steps

    def plan(self, hold_prefill: bool) -> StepPlan | NeedsResult | None:
        """The scheduler's next step."""
        if self._log is not None:
            self._log.runs()
        plan = self.scheduler.schedule(hold_prefill)
        if self._log is not None and isinstance(plan, StepPlan):
            self._log.reporter.planned(self.scheduler)
        return plan

    def finish(self, cost: StepCost, is_graph: bool = False) -> list[RequestEvent]:
        """Applies the result of the oldest step."""
        record = self.scheduler.in_flight[0]
        accepted = [self._accepted(depth) for depth in record.depths]
        accepted += [0] * (len(record.sampled) - len(accepted))
        tokens = [self._next_tokens(request, 1 + more) for request, more in zip(record.sampled, accepted)]
        drafting = cost.by_resource.get("drafts", 0.0)
        result = StepResult(
            record.number,
            record.sampled_rows,
            tokens,
            seconds=cost.seconds,
            draft_seconds=drafting,
            cuda_graph=is_graph,
            kv_done=() if record.kv_ops is None else tuple(load.id for load in record.kv_ops.loads),
        )
        events = self.scheduler.update(result)
        if self._log is not None:
            self._log.runs()
            self._log.reporter.finished(result, self.scheduler.speculator)
        return events

    def take_decode(self, now: float) -> list[Running] | None:
        """`finish` of a decode in which no answer begins or ends: the requests, which have a further token. None: call
        `finish`."""
        taken = None if self._log is not None else take_decode(self.scheduler, self._lengths, self._answer, now)
        if taken is None:
            return None
        self.load_tokens += len(taken)
        return [self.running[request.rid] for request in taken]

    def _next_tokens(self, request: Request, count: int) -> list[int]:
        """The next tokens of its answer; the last one is the end token, unless the answer ends by its length."""
        done, length = len(request.output_ids), self._lengths.get(request.rid)
        if length is None:  # it has ended meanwhile
            return [EOS]
        if done + count < length:
            return self._answer(request, count)
        left = max(length - done, 1)
        tokens = self._answer(request, left)
        if done + left < request.max_new_tokens:
            tokens[-1] = EOS
        return tokens

    def _answer(self, request: Request, count: int) -> list[int]:
        """The next tokens of its answer, which does not end with them."""
        done = len(request.output_ids)
        return self.running[request.rid].answer[done : done + count]

    def _accepted(self, drafts: int) -> int:
        for i in range(drafts):
            rate = self._acceptance[min(i, len(self._acceptance) - 1)] if self._acceptance else 0.0
            if self._rng.random() >= rate:
                return i
        return drafts

    # -- runs of decode steps

    def run_limit(self, hold_prefill: bool) -> int:
        """Decode steps that can pass without the scheduler, starting with the step in flight; 0: the scheduler must
        plan.

        Args:
            hold_prefill: prompts wait for the turn of their group, which must end the run.
        """
        return decode_run_limit(self.scheduler, self._lengths, hold_prefill)

    def rows_after(self, steps: int) -> int:
        """Requests that still decode after a run of so many steps."""
        return len(decodes_after(self.scheduler.table.decodes, steps))

    def chunk_limits(self) -> ChunkLimits | None:
        """The run with chunks that may begin with the step in flight. The replica has several groups."""
        if self.scheduler.table.chunked is None or not self._has_chunk_runs:
            return None
        return chunk_limits(self.scheduler, self._lengths)

    @property
    def most_in_a_row(self) -> int:
        """Steps with prompts after which running requests decode."""
        return self.scheduler.table.settings.max_consecutive_prefills

    def begin_run(self, rows: int, runs: Runs, chunk_size: int = 0) -> None:
        """Begins a run of `rows` requests with the next step of `runs`."""
        self.chunk_size = chunk_size
        self.run_rows, self.run_from, self._run_began = rows, runs.step, runs.sums.mark()
        self._contended = self._run_began if self.scheduler.table.queue.entries else None

    def queued_in_run(self, sums: StepSums) -> None:
        """Records that a request waits during the run."""
        if self._contended is None:
            self._contended = sums.mark()

    def beyond_end(self, runs: Runs, holds: bool) -> tuple[int, int, int] | None:
        """How its run goes on behind the last step of some requests, which is in flight: the requests of the next step,
        their context tokens, and the number of those that decode behind it; None if the scheduler must plan.

        Args:
            holds: its prompts wait for their turn, and the next step has none. Other prompts wait for memory, which an
            end may free.
        """
        steps, scheduler = self.earlier + runs.step - self.run_from, self.scheduler
        if self.chunk_size or (scheduler.num_waiting and not holds):
            return None
        rest = decodes_beyond(scheduler, self._lengths, steps)
        if rest is None:
            return None
        context = sum([request.num_computed + steps + 1 for request in rest])
        return len(rest), context, len(decodes_after(rest, steps + 1))

    def go_on(self, index: int, runs: Runs) -> list[RequestEvent]:
        """Ends the requests of its run, as group `index`, whose last step has passed; the run goes on with the others.
        Returns their ends; none: the run must end."""
        if self.run_rows == 1:
            return []
        steps = self.earlier + runs.step - self.run_from
        limit = steps_behind_ends(self.scheduler, self._lengths, steps)
        if limit < 1:
            return []
        events = self.end_run(runs.sums, goes_on=True)
        decodes = self.scheduler.table.decodes
        self.begin_run(len(decodes), runs)
        self.earlier = steps
        runs.go_on(index, limit, len(decodes_after(decodes, steps + limit)))
        return events

    def end_run(self, sums: StepSums, goes_on: bool = False) -> list[RequestEvent]:
        """Applies the steps of a run to the scheduler, `goes_on`: only those of requests that have ended. Returns the
        ends of requests; their tokens count as those of the run."""
        taken, events = sums.since(self._run_began), list[RequestEvent]()
        steps = taken.count
        if steps or self.earlier:
            waits = Steps() if self._contended is None else sums.since(self._contended)
            ended = run_decodes(self.scheduler, taken, waits, self._answer, self.earlier, goes_on)
            self.load_tokens += self.run_rows * steps
            events = [RequestEvent(r.rid, [], r.finish_reason, r.cached_tokens, r.retractions) for r in ended]
        self.run_rows = self.earlier = 0
        return events

    def end_chunks(self, runs: Runs, index: int, in_flight: str, launched: float) -> None:
        """Applies the steps of a run with chunks to the scheduler, as group `index`; see `ChunkRun`."""
        decodes = runs.step - self.run_from if self.run_rows else 0
        times, last = self.chunk_times, None
        if index in runs.joined:
            *times, last = times
        if decodes or self.chunk_times or in_flight == "last":
            run = ChunkRun(
                self.chunk_size, decodes, times, self._run_began, runs.sums.mark(), self._contended, in_flight,
                launched, runs.chunks_in_a_row(index), runs.last_size(index), last,
            )  # fmt: skip
            run_chunks(self.scheduler, run, self._answer)
            self.load_tokens += self.run_rows * decodes
        self.run_rows = self.chunk_size = 0
        self.chunk_times = []

    def first_tokens(self, sampled: Sequence[Request], now: float) -> list[RequestEvent]:
        """Applies the first tokens of prompts whose last chunk was in the step of the first chunk of its run."""
        begin_answers(self.scheduler, sampled, now, self._answer)
        return [RequestEvent(r.rid, r.output_ids[-1:], None, r.cached_tokens, r.retractions) for r in sampled]

    def first_token(self) -> RequestEvent:
        """The first token of the prompt whose last chunk has been computed in its run."""
        chunked = self.scheduler.table.chunked
        assert chunked is not None
        request = chunked.request
        return RequestEvent(request.rid, self._answer(request, 1), None, request.cached_tokens, request.retractions)

    def decode_shape(self) -> StepShape:
        """Shape of a step in which all running requests decode, after the step in flight."""
        decodes = self.scheduler.table.decodes
        context = len(decodes) + sum([request.num_computed for request in decodes])
        return StepShape(len(decodes), context, 0, 0, 0, len(decodes))


def loaded_tokens(kv_ops: KVOps) -> int:
    """Tokens that a step loads from the host-RAM tier."""
    return sum(len(load.places) for load in kv_ops.loads)


def shape_of(plan: StepPlan) -> StepShape:
    """Counts of one scheduler's step."""
    num = plan.num_decodes
    counts, starts = plan.counts, plan.starts
    if num == len(counts) and plan.speculation is None:
        return StepShape(num, sum(starts) + num, 0, 0, 0, num)
    decode_tokens = sum(counts[:num])
    drafts = max(counts[:num], default=1) - 1 if plan.speculation is not None else 0
    tokens = pairs = cached = fresh = 0
    for start, count in zip(starts[num:], counts[num:]):
        tokens += count
        pairs += count * start + count * (count + 1) // 2
        cached += start
        fresh += count if start < count else 0
    context = sum(starts[:num]) + decode_tokens
    return StepShape(num, context, drafts, tokens, pairs, decode_tokens + tokens, 0.0, cached, fresh)
