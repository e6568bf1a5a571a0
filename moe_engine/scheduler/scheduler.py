"""The scheduler of one rank: owns all requests, plans steps, takes results in. No tensors.

The core calls `schedule()` for a plan, hands it to the worker, and calls `update()` with the result, in order. One step
may be in flight while the next is planned: then running requests are planned as decodes whose token is still on the
device, requests known to end by length are left out, and nothing that a step in flight may touch gets a new owner.

Prefill goes before decode: a plan has prompts only as long as some can be admitted (`--enable-mixed-chunk`: both), but
after `max_consecutive_prefills` such plans the running requests get a step.
"""

from __future__ import annotations

import enum
import logging
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Literal

from moe_engine.errors import MoeEngineError
from moe_engine.scheduler import log_lines
from moe_engine.scheduler.admission import Admission, Blocked, PrefillBatch
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.events import PlanFacts, RequestEvent, SchedulerStats
from moe_engine.scheduler.failed_step import give_up, resend
from moe_engine.scheduler.integrity import check_integrity
from moe_engine.scheduler.plan_draft import PlanDraft, StepRecord
from moe_engine.scheduler.request_table import RequestTable
from moe_engine.scheduler.results import read_result
from moe_engine.scheduler.retraction import choose_preempted, choose_victims
from moe_engine.scheduler.speculation import Speculator
from moe_engine.scheduler.stats import Totals, snapshot
from moe_engine.scheduler.suspects import MAX_FAILURES_ALONE, Suspects
from moe_engine.scheduler.token_ratio import NewTokenRatio
from moe_engine.types import FinishReason, Request, Status, StepPlan, StepResult

logger = logging.getLogger("moe_engine")

ABORTED = FinishReason("abort", message="Aborted")
RETRY_DECODE_STEPS = 10
"""A queue blocked by memory is looked at again after so many decode steps, or when something was freed."""


class NeedsResult(enum.Enum):
    """Answer of `schedule()`: take in the result of the step in flight, then ask again."""

    NEEDS_RESULT = "needs drain"


NEEDS_RESULT: Final = NeedsResult.NEEDS_RESULT


class Scheduler:
    """See the module. Not thread-safe; every method returns at once."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.book = RequestTable(config)
        self.memory = self.book.memory
        self.ratio = NewTokenRatio(config)
        self.speculator = Speculator(config.speculation) if config.speculation is not None else None
        self.last_facts: PlanFacts | None = None
        """About the plan that `schedule()` returned last."""
        self.totals = Totals()
        self._clock = clock
        self._admission = Admission(config, self.memory, self.book.queue)
        self._flying: deque[StepRecord] = deque()
        self._to_cache: list[Request] = []
        self._prefills_in_a_row = 0
        self._decode_steps = 0
        self._retry_at = 0
        """Admission is blocked by memory until this decode step, or until something was freed."""
        self._paused_until = 0
        """Admission pauses after a retraction until this decode step, or until a request has left its row."""
        self._left_at_pause = 0
        self._preempting = False
        """The next plan is for prefill alone, so that it can preempt (mixed chunks take decodes in first)."""
        self._suspects = Suspects()
        self._alone_turn = True
        """While there are suspects, their steps and those of the others take turns."""

    # -- requests come and go

    def add(self, request: Request) -> list[RequestEvent]:
        """Queues a request. Returns the end of a less urgent one that had to leave a full queue, if so.

        Raises:
            InputError: it could never run, its rid is in use, or the queue is full (status 503).
        """
        events = self.book.add(request, self._clock())
        if self.config.uses_priority:
            self._retry_at = 0
        return events

    def abort(self, rids: Iterable[str], reason: FinishReason = ABORTED) -> list[RequestEvent]:
        """Ends these requests, where they have not ended already. Returns the events of those that could end at once:
        the waiting ones, and without a step in flight the running ones too; the others end in the next `update`."""
        live = self.book.live
        return self._end([live[rid] for rid in dict.fromkeys(rids) if rid in live], reason)

    def abort_all(self, reason: FinishReason = ABORTED) -> list[RequestEvent]:
        """`abort` of every request."""
        return self._end(list(self.book.live.values()), reason)

    def _end(self, requests: list[Request], reason: FinishReason) -> list[RequestEvent]:
        now = self._clock()
        events = self.book.end_all(requests, reason, now)
        if not self._flying:
            events += self.book.end_aborting(now)
            self._rest_if_idle()
        return events

    def step_failed(self, number: int, reason: str) -> list[RequestEvent]:
        """A step raised, and steps planned behind it will bring nothing: their requests go back and are computed again
        from the tokens that clients have, nothing of these steps stays in the cache. The requests of the failed one are
        suspects, each with steps of its own; one that fails in such a step ends with status 500.

        Returns the ends of requests.
        """
        now, records = self._clock(), list(self._flying)
        assert records and records[0].number == number
        self._forget_flying()
        cause = records[0].alone
        accused, events, num_back = give_up(self.book, records, now)
        self.totals.retractions += num_back
        if cause is None:
            self._suspects.accuse(accused)
        else:
            self._suspects.failed(cause)
            events += self.book.end_cause(cause, FinishReason("abort", message=reason, status_code=500), now)
        resend(self.book, records)
        self._alone_turn = True
        self._retry_at = self._paused_until = 0
        self._preempting = False
        self._rest_if_idle()
        return events

    def _forget_flying(self) -> None:
        """Skips a step number: the worker does not run the step whose number follows that of a failed one."""
        self._flying.clear()
        self._to_cache.clear()
        self.memory.step += 1

    @property
    def is_broken(self) -> bool:
        """Whether so many steps failed, of different requests alone, that the requests are not the reason."""
        return self._suspects.failed_alone >= MAX_FAILURES_ALONE

    def start_over(self) -> list[RequestEvent]:
        """Forgets steps in flight and the cache; what ran is computed again from the tokens that were told.

        Returns the ends of requests that were to be aborted.
        """
        now = self._clock()
        self._forget_flying()
        events = self.book.end_aborting(now)
        self.totals.retractions += self.book.num_running
        self.book.start_over()
        self.memory.retire(self.memory.step)
        self._retry_at = self._paused_until = 0
        self._preempting = False
        return events

    def flush_cache(self) -> bool:
        """Forgets all cached prefixes; only when idle. True if done."""
        book = self.book
        if not self.is_idle():
            logger.warning(log_lines.flush_refused_line(len(book.queue), book.num_running))
            return False
        self.memory.reset()
        logger.info(log_lines.FLUSHED_LINE)
        return True

    # -- planning

    def schedule(self, hold_prefill: bool = False) -> StepPlan | Literal[NeedsResult.NEEDS_RESULT] | None:
        """The next step; None if there is nothing to do now (with a step in flight: before its result is in);
        NEEDS_RESULT if memory is so short that the step in flight must be taken in first.

        Args:
            hold_prefill: no prompts in this step, because others want to decode.
        """
        if self._flying and self._flying[-1].alone is not None:
            return self._drain()  # nothing is built on it, or shared, before it has worked
        self._absorb_prefills()
        if not self._suspects:
            return self._schedule(hold_prefill)
        turns = (self._schedule_alone, self._schedule) if self._alone_turn else (self._schedule, self._schedule_alone)
        return turns[0](hold_prefill) or turns[1](hold_prefill)

    def _schedule(self, hold_prefill: bool) -> StepPlan | Literal[NeedsResult.NEEDS_RESULT] | None:
        """A step of everybody but suspects."""
        book, draft = self.book, PlanDraft()
        num_before = book.num_running
        mixed = self.config.enable_mixed_chunk and not self._preempting
        if mixed and book.decodes and not self._decode_into(draft):
            return self._drain()
        skip = hold_prefill or (not mixed and self._is_decode_turn())
        batch = PrefillBatch() if skip else self._build_prefill(draft.num_decode_tokens)
        if batch is None:
            return self._drain()
        if not mixed and not batch.jobs and book.decodes and not self._decode_into(draft):
            return self._drain()
        if batch.jobs:
            self._prefill_into(draft, batch)
        if not draft.rows:
            return None
        self._alone_turn = True
        self._note_kind(draft)
        return self._launch(draft, batch, num_before)

    def _schedule_alone(self, hold_prefill: bool) -> StepPlan | Literal[NeedsResult.NEEDS_RESULT] | None:
        """A step of one suspect, with nothing else in flight; None if none of them can go on now."""
        book, suspects = self.book, self._suspects
        for suspect in suspects.ready(book, hold_prefill):
            if self._flying:
                return self._drain()
            draft, batch, num_before = PlanDraft(), PrefillBatch(), book.num_running
            if suspect in book.decodes:
                self._decode_into(draft, suspect)
            else:
                batch = self._admit(0, True, partial(operator.is_, suspect))
                suspects.no_room = not batch.jobs
                if batch.jobs:
                    self._prefill_into(draft, batch)
            if draft.rows:
                self._alone_turn = False
                self._note_kind(draft)
                return self._launch(draft, batch, num_before, suspect)
        return None

    def _note_kind(self, draft: PlanDraft) -> None:
        if draft.num_decodes:
            self._decode_steps += 1
            self._prefills_in_a_row = 0
        else:
            self._prefills_in_a_row += 1

    def empty_plan(self) -> StepPlan:
        """A plan without requests, for a rank that must join a step of others. Its (empty) result goes to `update`."""
        return self._launch(PlanDraft(), PrefillBatch(), self.book.num_running)

    def _drain(self) -> Literal[NeedsResult.NEEDS_RESULT]:
        self.totals.drains += 1
        return NeedsResult.NEEDS_RESULT

    def _is_decode_turn(self) -> bool:
        return bool(self._due()) and self._prefills_in_a_row >= self.config.max_consecutive_prefills

    def _due(self, alone: Request | None = None) -> list[Request]:
        """Requests that decode in a step of this suspect, or of everybody else."""
        decodes = self.book.decodes
        if alone is not None:
            return [alone] if alone in decodes else []
        return [r for r in decodes if r not in self._suspects] if self._suspects else decodes

    def _absorb_prefills(self) -> None:
        """What the last plan prefills is shared from now on: later steps run after it."""
        for request in self._to_cache:
            if request.row >= 0:
                write = self.memory.cache_unfinished(request)
                if write is not None:
                    self.book.row_writes.append(write)
        self._to_cache.clear()

    def _decode_into(self, draft: PlanDraft, alone: Request | None = None) -> bool:
        """All running requests decode, or a suspect alone. False if that has to wait for the step in flight."""
        book = self.book
        some_end = self._add_decodes(draft, self._due(alone))
        if some_end is not None:
            self.ratio.decay()
        elif self._flying:
            return False
        else:
            self._retract()
            some_end = self._add_decodes(draft, self._due(alone))
        if some_end:
            book.decodes = [r for r in book.decodes if len(r.output_ids) + r.num_in_flight < r.max_new_tokens]
        return True

    def _add_decodes(self, draft: PlanDraft, requests: list[Request]) -> bool | None:
        """None if there is no room for them; else whether some of them need no further step."""
        memory = self.memory
        if not requests:
            return False
        if self.speculator is not None:
            return self.speculator.decode_into(draft, requests, self.book, memory)
        if not memory.make_room(memory.decode_need(requests)):
            return None
        return draft.add_decodes(requests, memory)

    def _retract(self) -> None:
        """Makes room for the decodes by sending some back. Nothing is in flight."""
        book, memory, old = self.book, self.memory, self.ratio.value
        victims = choose_victims(book.in_rows(), self.config, memory)
        if victims:
            book.step_back(victims)
            self.totals.retractions += len(victims)
            self.ratio.after_retraction(book.decodes)
            self._paused_until = self._decode_steps + self.config.retract_decode_steps
            self._left_at_pause = book.num_left
            logger.info(log_lines.retract_line(len(victims), old, self.ratio.value))
        need = memory.decode_need(book.decodes)
        if memory.make_room(need):
            return
        found = self.check_integrity()
        if not memory.make_room(need):
            raise MoeEngineError(
                f"the KV pool of {memory.slots.num_slots} tokens has no room for {need} more although only "
                f"{len(book.decodes)} requests run; findings: {found or 'none'}"
            )

    def _build_prefill(self, num_mixed: int) -> PrefillBatch | None:
        """The next prefill batch, perhaps empty. None: a preemption has to wait for the step in flight."""
        book = self.book
        may_admit = bool(book.queue)
        if may_admit and book.num_running:
            paused = self._decode_steps < self._paused_until and book.num_left == self._left_at_pause
            may_admit = self._decode_steps >= self._retry_at and not paused
        may_join = self._suspects.is_free if self._suspects else None
        if may_join is not None:
            if book.chunked is not None and not may_join(book.chunked.request):
                return PrefillBatch()  # there is one chunked prompt at a time
            may_admit &= not self._suspects.keep_out(book)
        if book.chunked is None and not may_admit:
            return PrefillBatch()
        batch = self._admit(num_mixed, may_admit, may_join)
        if not num_mixed:
            self._preempting = False
        if batch.blocked is not Blocked.ROWS and batch.blocked is not Blocked.TOKENS:
            return batch
        entry = batch.blocked_entry
        if batch.jobs or entry is None:  # what was admitted counts for less from the next step on: look again then
            return batch
        self._retry_at = self._decode_steps + RETRY_DECODE_STEPS
        if not self.config.uses_priority:
            return batch
        need = self.config.ceil_page(len(entry.tokens)) + self.config.page_size
        victims = choose_preempted(book.in_rows(), entry.request, self.config, self.memory, need)
        if not victims:
            return batch
        if num_mixed or self._flying:  # decodes are planned already, or under way: preempt in the next call
            self._preempting = True
            self._retry_at = 0
            return batch if num_mixed else None
        book.step_back(victims)
        self.totals.preemptions += len(victims)
        return self._admit(num_mixed, may_admit, may_join)

    def _admit(
        self, num_mixed: int, may_admit: bool, may_join: Callable[[Request], bool] | None = None
    ) -> PrefillBatch:
        book, ratio = self.book, self.ratio.value
        running = book.num_running
        return self._admission.build(ratio, book.decodes, running, book.chunked, num_mixed, may_admit, may_join)

    def _prefill_into(self, draft: PlanDraft, batch: PrefillBatch) -> None:
        now = self._clock()
        book = self.book
        book.chunked = None
        for job in batch.jobs:
            request = job.entry.request
            if job.is_new:
                request.status = Status.RUNNING
                request.followed = True
                if request.first_scheduled is None:
                    request.first_scheduled = now
                    request.cached_tokens = job.start
                    self.totals.cached_tokens += job.start
                    self.totals.prompt_tokens += len(request.prompt_ids)
            if not job.is_last:
                book.chunked = job.entry
            if draft.add_prefill(job):
                book.decodes.append(request)
            self._to_cache.append(request)
        self.totals.hit_rate = batch.cached_tokens / (batch.cached_tokens + batch.num_tokens)

    def _launch(self, draft: PlanDraft, batch: PrefillBatch, num_before: int, alone: Request | None = None) -> StepPlan:
        book, memory = self.book, self.memory
        memory.step += 1
        follow = self.speculator is not None and self._follows(draft, batch)
        plan, record = draft.finish(memory.step, book.row_writes, book.finished_rows, follow)
        book.row_writes, book.finished_rows = [], []
        record.alone = alone
        self._flying.append(record)
        used = memory.num_used
        self.last_facts = PlanFacts(
            number=plan.number,
            new_seq=len(batch.jobs),
            new_token=batch.num_tokens,
            cached_token=batch.cached_tokens,
            num_decodes=draft.num_decodes,
            num_running=num_before,
            num_queued=len(book.queue),
            num_used=used,
            token_usage=used / memory.slots.num_slots,
            draft_depth=max(draft.depths, default=0),
            prompt_logprobs=any(_asks_prompt_logprobs(job.entry.request) for job in batch.jobs),
        )
        return plan

    def _follows(self, draft: PlanDraft, batch: PrefillBatch) -> bool:
        """Whether the drafter follows this step."""
        assert self.speculator is not None
        decodes = draft.sampled[: draft.num_decodes]
        requests = decodes + [job.entry.request for job in batch.jobs]
        return self.speculator.follows(requests, ordinary=bool(decodes) and not draft.speculative)

    # -- results

    def update(self, result: StepResult) -> list[RequestEvent]:
        """Takes in the result of the oldest step in flight.

        Raises:
            MoeEngineError: the result does not belong to that step.
        """
        if not self._flying or self._flying[0].number != result.number:
            waits = self._flying[0].number if self._flying else "none"
            raise MoeEngineError(f"the result of step {result.number} came, but the oldest in flight is {waits}")
        record = self._flying.popleft()
        if self.memory.retire(result.number):
            self._retry_at = 0
        left, now = self.book.num_left, self._clock()
        draft_outcomes: list[tuple[int, int]] = []
        events = read_result(self.book, record, result, now, draft_outcomes)
        if self.speculator is not None:
            self.speculator.observe(record, result, draft_outcomes)
        self.totals.generated_tokens += sum(len(event.token_ids) for event in events)
        if self.book.aborting:
            events += self.book.end_aborting(now)
        if result.rows or record.prefilled:
            self._suspects.worked()
        if record.alone is not None:
            self._suspects.passed(record.alone)
        if self.book.num_left != left:
            self._retry_at = 0
            self._rest_if_idle()
        return events

    # -- looking at it

    @property
    def num_in_flight(self) -> int:
        """Steps planned whose result has not come."""
        return len(self._flying)

    @property
    def num_waiting(self) -> int:
        """Requests with prompt tokens that no plan has taken yet."""
        return len(self.book.queue) + (self.book.chunked is not None)

    def is_idle(self) -> bool:
        """No request and no step in flight."""
        return not self.book.live and not self._flying

    def _rest_if_idle(self) -> None:
        """The ratio starts afresh; counts are compared, and only if they do not add up is everything recounted."""
        if not self.is_idle():
            return
        self.ratio.reset()
        self._retry_at = self._paused_until = 0
        memory = self.memory
        rows = memory.rows
        if (
            memory.tree.num_protected
            or memory.slots.num_free + memory.tree.num_evictable != memory.slots.num_slots
            or rows.num_free != rows.num_total
        ):
            self.check_integrity()

    def check_integrity(self) -> list[str]:
        """Recounts every slot, row and lock, repairs what is wrong, logs it and returns the findings. Costs a walk over
        the pool: for idle times and tests."""
        findings = check_integrity(self.memory, self.book.live.values())
        for finding in findings:
            logger.warning("KV bookkeeping repaired: %s", finding)
        return findings

    def stats(self) -> SchedulerStats:
        speculation = self.speculator.stats() if self.speculator is not None else None
        return snapshot(self.book, self.totals, self.ratio.value, self._clock(), speculation)


def _asks_prompt_logprobs(request: Request) -> bool:
    return request.logprobs is not None and request.logprobs.start is not None
