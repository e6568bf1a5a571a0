"""The scheduler of one attention group: owns all requests, plans steps, applies results. No tensors.

The core calls `schedule()` for a plan, passes it to the worker, and calls `update()` with the result, in order. One
step may be in flight while the next is planned (overlap schedule): running requests are planned as decodes whose input
token is still on the device, requests known to end by length are left out, and slots that a step in flight may use are
not reallocated.

Prefill has precedence: a plan has only prompts while some can be admitted (`--enable-mixed-chunk`: both), but after
`max_consecutive_prefills` such plans the running requests get a decode step.
"""

from __future__ import annotations

import enum
import logging
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, Literal

from moe_engine.errors import MoeEngineError
from moe_engine.scheduler import log_lines
from moe_engine.scheduler.admission import Admission, Blocked, PrefillBatch
from moe_engine.scheduler.autopilot import Autopilot
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.events import PlanFacts, RequestEvent, SchedulerStats
from moe_engine.scheduler.failed_step import resend, roll_back
from moe_engine.scheduler.integrity import check_integrity
from moe_engine.scheduler.plan_draft import PlanDraft, StepRecord
from moe_engine.scheduler.request_table import RequestTable
from moe_engine.scheduler.results import read_result
from moe_engine.scheduler.retraction import choose_preempted, choose_victims
from moe_engine.scheduler.speculation import Speculator
from moe_engine.scheduler.stats import Totals, plan_facts, snapshot
from moe_engine.scheduler.suspects import Suspects
from moe_engine.scheduler.token_ratio import NewTokenRatio
from moe_engine.types import FinishReason, KVReport, Request, Status, StepPlan, StepResult

logger = logging.getLogger("moe_engine")

ABORTED = FinishReason("abort", message="Aborted")
RETRY_DECODE_STEPS = 10
"""Decode steps after which admission blocked by memory is retried; it is retried earlier if memory is freed."""


class NeedsResult(enum.Enum):
    """Result of `schedule()`: call `update` with the result of the step in flight, then call `schedule` again."""

    NEEDS_RESULT = "needs drain"


NEEDS_RESULT: Final = NeedsResult.NEEDS_RESULT


class Scheduler:
    """See the module docstring. Not thread-safe; no method blocks."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.table = RequestTable(config, clock)
        self.kv_cache = self.table.kv_cache
        self._connector = self.kv_cache.connector
        self.ratio = NewTokenRatio(self.table.settings)
        self.speculator = Speculator(config.speculation) if config.speculation is not None else None
        self.last_facts: PlanFacts | None = None  # of the last plan of `schedule()`
        self.keeps_facts = True
        self.totals = Totals()
        self._clock = clock
        self.autopilot = Autopilot(self.table, self.totals, clock()) if config.autopilot else None
        table = self.table
        self._admission = Admission(table.settings, self.kv_cache, table.queue, table.lora, table.sessions)
        self._in_flight: deque[StepRecord] = deque()
        self._to_cache: list[Request] = []
        self._prefills_in_a_row = 0
        self._decode_steps = 0
        self._retry_at = 0
        """Admission is blocked by memory until this decode step, or until memory is freed."""
        self._paused_until = 0
        """Admission pauses after a retraction until this decode step, or until a row is released."""
        self._released_at_pause = 0
        self._preempting = False
        """The next plan is prefill-only, so that it can preempt (mixed chunks plan decodes first)."""
        self._suspects = Suspects()
        self._suspect_turn = True
        """Steps of suspects alternate with steps of the other requests."""

    # -- add and abort

    def add(self, request: Request) -> list[RequestEvent]:
        """Queues a request. Returns the final event of a less urgent request that it displaced from a full queue.

        Raises:
            InputError: the request could never run, its rid is in use, or the queue is full (status 503).
        """
        events = self.table.add(request, self._clock())
        if self.config.uses_priority:
            self._retry_at = 0
        return self._suspects.without_probe(events)

    def abort(self, rids: Iterable[str], reason: FinishReason = ABORTED) -> list[RequestEvent]:
        """Ends these requests, if they have not ended already. Returns the final events of waiting requests, and of
        running requests if no step is in flight; other running requests end in the next `update`."""
        live = self.table.live
        return self._end([live[rid] for rid in dict.fromkeys(rids) if rid in live], reason)

    def abort_all(self, reason: FinishReason = ABORTED) -> list[RequestEvent]:
        """`abort` of every request."""
        return self._end(list(self.table.live.values()), reason)

    def _end(self, requests: list[Request], reason: FinishReason) -> list[RequestEvent]:
        now = self._clock()
        events = self.table.end_all(requests, reason, now)
        if not self._in_flight:
            events += self.table.end_aborting(now)
            self._reset_if_idle()
        return self._suspects.without_probe(events)

    def step_failed(self, number: int, reason: str) -> list[RequestEvent]:
        """A step raised, and steps planned behind it will not run: their requests are retracted and recomputed from the
        tokens that clients have; nothing of these steps stays in the radix cache. The requests of the failed step
        become suspects, which run alone; a suspect whose own step fails ends with status 500.

        Returns the final events of requests.
        """
        now, records = self._clock(), list(self._in_flight)
        assert records and records[0].number == number
        self._drop_in_flight()
        if self._connector is not None:
            kv_ops = [record.kv_ops for record in records if record.kv_ops is not None]
            self._connector.steps_failed(kv_ops, self.kv_cache.step)
        cause = records[0].alone
        suspects, events, num_retracted = roll_back(self.table, records, now)
        self.totals.retractions += num_retracted
        if cause is None:
            self._suspects.add(suspects)
        else:
            self._suspects.failed(cause)
            events += self.table.end_failed(cause, FinishReason("abort", message=reason, status_code=500), now)
        resend(self.table, records)
        self._suspect_turn = True
        events = self._suspects.without_probe(events)
        probe = self._suspects.make_probe()
        if probe is not None:
            self.table.add(probe, now)
        self._reset_if_idle()
        return events

    def _drop_in_flight(self) -> None:
        """Drops steps in flight and planning pauses; skips a step number, as the worker refuses the next one."""
        self._in_flight.clear()
        self._to_cache.clear()
        self.kv_cache.step += 1
        self._retry_at = self._paused_until = 0
        self._preempting = False

    @property
    def is_broken(self) -> bool:
        """Whether the step of a probe failed: requests are not the cause."""
        return self._suspects.is_broken

    def start_over(self) -> list[RequestEvent]:
        """Drops steps in flight and the KV cache; running requests are recomputed from the tokens that clients have.

        Returns the final events of requests to abort.
        """
        now = self._clock()
        self._drop_in_flight()
        events = self.table.end_aborting(now)
        self.totals.retractions += self.table.num_running
        self.table.start_over()
        self.kv_cache.retire(self.kv_cache.step)
        return events

    def flush_cache(self, paused: bool = False) -> bool:
        """Clears the radix cache, only when idle; if `paused`, also before waiting requests. True if done."""
        table = self.table
        if not self.is_idle() and (not paused or self._in_flight or self.num_loading or table.num_running):
            logger.warning(log_lines.flush_refused_line(len(table.queue), table.num_running))
            return False
        self.kv_cache.reset()
        logger.info(log_lines.FLUSHED_LINE)
        return True

    # -- planning

    def schedule(self, hold_prefill: bool = False) -> StepPlan | Literal[NeedsResult.NEEDS_RESULT] | None:
        """The next step; None if no step can be planned now (with a step in flight: before its result);
        NEEDS_RESULT if memory is short and the result of the step in flight must be applied first.

        Args:
            hold_prefill: no prompts in this step, because other attention groups decode.
        """
        if self._in_flight and self._in_flight[-1].alone is not None:
            return self._drain()  # a suspect's step must succeed before another is planned or its KV is cached
        self._cache_prefills()
        if not self._suspects:
            plan = self._schedule(hold_prefill)
            if self._connector is not None and not isinstance(plan, StepPlan):
                return self.empty_plan() if self._connector.has_new_loads and not self._in_flight else plan
            return plan
        turns = (self._schedule_alone, self._schedule) if self._suspect_turn else (self._schedule, self._schedule_alone)
        return turns[0](hold_prefill) or turns[1](hold_prefill)

    def _schedule(self, hold_prefill: bool) -> StepPlan | Literal[NeedsResult.NEEDS_RESULT] | None:
        """A step of all requests except suspects."""
        table, draft, num_before = self.table, PlanDraft(), self.table.num_running
        mixed = self.config.enable_mixed_chunk and not self._preempting
        if mixed and table.decodes and not self._decode_into(draft):
            return self._drain()
        skip = hold_prefill or (not mixed and self._is_decode_turn())
        batch = PrefillBatch() if skip else self._build_prefill(draft.num_decode_tokens)
        if batch is None:
            return self._drain()
        if not mixed and not batch.jobs and table.decodes and not self._decode_into(draft):
            return self._drain()
        if batch.jobs:
            self._prefill_into(draft, batch)
        if not draft.rows:
            return None
        self._suspect_turn = True
        self._count_kind(draft)
        return self._launch(draft, batch, num_before)

    def _schedule_alone(self, hold_prefill: bool) -> StepPlan | Literal[NeedsResult.NEEDS_RESULT] | None:
        """A step of one suspect, without another step in flight; None if no suspect can run now."""
        table, suspects = self.table, self._suspects
        for suspect in suspects.ready(table, hold_prefill):
            if self._in_flight:
                return self._drain()
            draft, batch, num_before = PlanDraft(), PrefillBatch(), table.num_running
            if suspect in table.decodes:
                self._decode_into(draft, suspect)
            else:
                batch = self._admit(0, True, partial(operator.is_, suspect))
                suspects.no_room = not batch.jobs
                if batch.jobs:
                    self._prefill_into(draft, batch)
            if draft.rows:
                self._suspect_turn = False
                self._count_kind(draft)
                return self._launch(draft, batch, num_before, suspect)
        return None

    def _count_kind(self, draft: PlanDraft) -> None:
        if draft.num_decodes:
            self._decode_steps += 1
            self._prefills_in_a_row = 0
        else:
            self._prefills_in_a_row += 1

    def empty_plan(self) -> StepPlan:
        """A plan of an idle batch, for a DP group that joins a step of others. Its empty result goes to `update`."""
        return self._launch(PlanDraft(), PrefillBatch(), self.table.num_running)

    def _drain(self) -> Literal[NeedsResult.NEEDS_RESULT]:
        self.totals.drains += 1
        return NeedsResult.NEEDS_RESULT

    def _is_decode_turn(self) -> bool:
        return bool(self._decodable()) and self._prefills_in_a_row >= self.table.settings.max_consecutive_prefills

    def _decodable(self, alone: Request | None = None) -> list[Request]:
        """Requests that decode in a step of this suspect, or in a step without suspects."""
        decodes = self.table.decodes
        if alone is not None:
            return [alone] if alone in decodes else []
        return [r for r in decodes if r not in self._suspects] if self._suspects else decodes

    def _cache_prefills(self) -> None:
        """Puts the prefills of the last plan into the radix cache: later steps run after it."""
        for request in self._to_cache:
            if request.row >= 0:
                write = self.kv_cache.cache_unfinished(request)
                if write is not None:
                    self.table.row_writes.append(write)
        self._to_cache.clear()

    def _decode_into(self, draft: PlanDraft, alone: Request | None = None) -> bool:
        """Adds decodes of all running requests, or of one suspect. False if that must wait for the step in flight."""
        table = self.table
        some_end = self._add_decodes(draft, self._decodable(alone))
        if some_end is not None:
            self.ratio.decay()
        elif self._in_flight or (self._connector is not None and self._connector.num_loading):
            return False
        else:
            self._retract()
            some_end = self._add_decodes(draft, self._decodable(alone))
        if some_end:
            table.decodes = [r for r in table.decodes if len(r.output_ids) + r.num_in_flight < r.max_new_tokens]
        return True

    def _add_decodes(self, draft: PlanDraft, requests: list[Request]) -> bool | None:
        """None if there is no room; else whether some of the requests need no further step."""
        if not requests:
            return False
        if self.speculator is not None:
            return self.speculator.decode_into(draft, requests, self.table, self.kv_cache)
        if self.table.jumps:
            return self.table.jumps.decode_into(draft, requests, self.kv_cache)
        if not self.kv_cache.make_room(self.kv_cache.decode_need(requests)):
            return None
        return draft.add_decodes(requests, self.kv_cache)

    def _retract(self) -> None:
        """Retracts requests to make room for the decodes. No step is in flight."""
        table, kv_cache, old = self.table, self.kv_cache, self.ratio.value
        victims = choose_victims(table.in_rows(), self.config, kv_cache)
        if victims:
            table.retract(victims)
            self.totals.retractions += len(victims)
            self.ratio.after_retraction(table.decodes)
            self._paused_until = self._decode_steps + self.config.retract_decode_steps
            self._released_at_pause = table.num_released
            logger.info(log_lines.retract_line(len(victims), old, self.ratio.value))
        need = kv_cache.decode_need(table.decodes)
        if kv_cache.make_room(need):
            return
        found = self.check_integrity()
        if not kv_cache.make_room(need):
            raise MoeEngineError(
                f"the KV pool of {kv_cache.slots.num_slots} tokens has no room for {need} more although only "
                f"{len(table.decodes)} requests run; findings: {found or 'none'}"
            )

    def _build_prefill(self, num_mixed: int) -> PrefillBatch | None:
        """The next prefill batch, perhaps empty. None: a preemption has to wait for the step in flight."""
        table = self.table
        may_admit = bool(table.queue)
        if may_admit and table.num_running:
            paused = self._decode_steps < self._paused_until and table.num_released == self._released_at_pause
            may_admit = self._decode_steps >= self._retry_at and not paused
        may_join = self._suspects.is_free if self._suspects else None
        if may_join is not None:
            if table.chunked is not None and not may_join(table.chunked.request):
                return PrefillBatch()  # at most one chunked prompt at a time
            may_admit &= not self._suspects.blocks_admission(table)
        if table.chunked is None and not may_admit:
            return PrefillBatch()
        batch = self._admit(num_mixed, may_admit, may_join)
        if not num_mixed:
            self._preempting = False
        if batch.blocked is not Blocked.ROWS and batch.blocked is not Blocked.TOKENS:
            return batch
        entry = batch.blocked_entry
        if batch.jobs or entry is None:  # admitted requests reserve less from the next step on: retry then
            return batch
        self._retry_at = self._decode_steps + RETRY_DECODE_STEPS
        if not self.config.uses_priority:
            return batch
        need = self.config.ceil_page(len(entry.tokens)) + self.config.page_size
        victims = choose_preempted(table.in_rows(), entry.request, self.config, self.kv_cache, need)
        if not victims:
            return batch
        if num_mixed or self._in_flight:  # decodes are planned already, or in flight: preempt in the next call
            self._preempting = True
            self._retry_at = 0
            return batch if num_mixed else None
        table.retract(victims)
        self.totals.preemptions += len(victims)
        return self._admit(num_mixed, may_admit, may_join)

    def _admit(
        self, num_mixed: int, may_admit: bool, may_join: Callable[[Request], bool] | None = None
    ) -> PrefillBatch:
        table, ratio = self.table, self.ratio.value
        running = table.num_running
        return self._admission.build(ratio, table.decodes, running, table.chunked, num_mixed, may_admit, may_join)

    def _prefill_into(self, draft: PlanDraft, batch: PrefillBatch) -> None:
        now = self._clock()
        table = self.table
        table.chunked = None
        for job in batch.jobs:
            request = job.entry.request
            if job.is_new:
                request.status = Status.RUNNING
                request.followed = True
                if request.first_scheduled is None:
                    request.first_scheduled = now
                    self.kv_cache.note_hit(request, job.start)
                    self.totals.cached_tokens += job.start
                    self.totals.prompt_tokens += len(request.prompt_ids)
            if not job.is_last:
                table.chunked = job.entry
            if draft.add_prefill(job):
                table.decodes.append(request)
            self._to_cache.append(request)
        self.totals.hit_rate = batch.cached_tokens / (batch.cached_tokens + batch.num_tokens)

    def _launch(self, draft: PlanDraft, batch: PrefillBatch, num_before: int, alone: Request | None = None) -> StepPlan:
        table, kv_cache = self.table, self.kv_cache
        kv_cache.step += 1
        follow = self.speculator is not None and self._follows(draft, batch)
        kv_ops = self._connector.build_connector_meta() if self._connector is not None else None
        more = kv_ops, kv_cache.take_window_pages(), table.take_lora_loads()
        plan, record = draft.finish(kv_cache.step, table.row_writes, table.finished_rows, follow, *more)
        table.row_writes, table.finished_rows, record.alone, record.launched = [], [], alone, self._clock()
        self._in_flight.append(record)
        if self.keeps_facts:
            self.last_facts = plan_facts(plan, draft, batch, num_before, table)
        return plan

    def _follows(self, draft: PlanDraft, batch: PrefillBatch) -> bool:
        """Whether the drafter runs a draft extend in this step."""
        assert self.speculator is not None
        decodes = draft.sampled[: draft.num_decodes]
        requests = decodes + [job.entry.request for job in batch.jobs]
        return self.speculator.follows(requests, plain=bool(decodes) and not draft.speculative)

    # -- results

    def update(self, result: StepResult) -> list[RequestEvent]:
        """Applies the result of the oldest step in flight.

        Raises:
            MoeEngineError: the result does not belong to that step.
        """
        oldest = self._in_flight[0].number if self._in_flight else "none"
        if oldest != result.number:
            raise MoeEngineError(f"got the result of step {result.number}, but the oldest step in flight is {oldest}")
        record = self._in_flight.popleft()
        if self.kv_cache.retire(result.number):
            self._retry_at = 0
        if result.kv_done:
            self.kv_arrived(result.kv_done)
        released, now = self.table.num_released, self._clock()
        draft_outcomes: list[tuple[int, int]] = []
        events = read_result(self.table, record, result, now, draft_outcomes)
        if self.speculator is not None:
            self.speculator.observe(record, result, draft_outcomes)
        self.totals.generated_tokens += sum([len(event.token_ids) for event in events])
        if self.table.aborting:
            events += self.table.end_aborting(now)
        if result.rows or record.prefilled:
            self._suspects.step_succeeded()
        if record.alone is not None:
            self._suspects.passed(record.alone)
        if self.autopilot is not None:
            blocked = self._admission.blocked is Blocked.TOKENS
            self.autopilot.after_step(events, now, self._decode_steps, blocked, bool(record.prefilled))
        if self.table.num_released != released:
            self._retry_at = 0
            self._reset_if_idle()
        return self._suspects.without_probe(events)

    def kv_arrived(self, kv_done: Sequence[int], reports: Sequence[KVReport] = ()) -> None:
        """The worker has completed these loads; progress of the storage, the least of all ranks."""
        self.kv_cache.kv_arrived(kv_done, reports)
        self._retry_at = 0
        self._reset_if_idle()

    # -- state

    @property
    def num_loading(self) -> int:
        """Loads and transfers of KV in progress."""
        return self._connector.num_loading + self.kv_cache.num_transfers if self._connector is not None else 0

    @property
    def num_in_flight(self) -> int:
        """Planned steps without a result yet."""
        return len(self._in_flight)

    @property
    def last_sampled(self) -> list[Request]:
        """Requests that sample in the last plan of `schedule()`, in order."""
        return self._in_flight[-1].sampled if self._in_flight else []

    @property
    def num_waiting(self) -> int:
        """Requests with prompt tokens that are not planned yet."""
        return len(self.table.queue) + (self.table.chunked is not None)

    def is_idle(self) -> bool:
        """Whether there is no request, no step in flight and no load of KV."""
        return not self.table.live and not self._in_flight and not self.num_loading

    def _reset_if_idle(self) -> None:
        """When idle, resets the ratio and compares counts; runs the full integrity check only if they disagree."""
        if not self.is_idle():
            return
        self.ratio.reset()
        self._retry_at = self._paused_until = 0
        if not self.kv_cache.is_released:
            self.check_integrity()

    def check_integrity(self) -> list[str]:
        """Recounts every slot, row and lock, repairs errors, logs and returns the findings. Walks the whole pool: for
        idle times and tests."""
        findings = check_integrity(self.kv_cache, self.table.live.values())
        for finding in findings:
            logger.warning("KV bookkeeping repaired: %s", finding)
        return findings

    def stats(self) -> SchedulerStats:
        speculation = self.speculator.stats() if self.speculator is not None else None
        return snapshot(self.table, self.totals, self.ratio.value, self._clock(), speculation)
