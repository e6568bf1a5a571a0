"""The scheduler of one attention group: owns all requests, plans steps, applies results. No tensors.

The core calls `schedule()` for a plan, passes it to the worker, and calls `update()` with the result, in order. One
step may be in flight while the next is planned (overlap schedule): running requests are planned as decodes whose input
token is still on the device, requests known to end by length are left out, and slots that a step in flight may use are
not reallocated.

Prefill has precedence: a plan has only prompts while some can be admitted (`--enable-mixed-chunk`: both, and in turn
only prompts while decodes take most of the chunk), but after `max_consecutive_prefills` such plans, or one that took
all waiting prompts, the running requests get a decode step.
`max_delayed_tokens` makes such a plan smaller while many requests decode, and prompts may have to wait for several
decode steps (`prefill_delays.py`).
"""

from __future__ import annotations

import enum
import logging
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Final, Literal

from moe_engine.errors import MoeEngineError
from moe_engine.scheduler import log_lines
from moe_engine.scheduler.admission import PrefillBatch
from moe_engine.scheduler.admission_backoff import AdmissionBackoff
from moe_engine.scheduler.autopilot import Autopilot
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.decode_scheduling import DecodeScheduling
from moe_engine.scheduler.draft_depth import DraftOutcome
from moe_engine.scheduler.events import PlanFacts, RequestEvent, SchedulerStats
from moe_engine.scheduler.failed_step import resend, roll_back
from moe_engine.scheduler.integrity import check_integrity
from moe_engine.scheduler.plan_draft import PlanDraft, StepRecord
from moe_engine.scheduler.prefill_delays import PrefillDelays
from moe_engine.scheduler.prefill_scheduling import PrefillScheduling
from moe_engine.scheduler.request_table import RequestTable
from moe_engine.scheduler.results import read_result
from moe_engine.scheduler.retraction import retract_all
from moe_engine.scheduler.speculation import Speculator
from moe_engine.scheduler.stats import Totals, plan_facts, snapshot
from moe_engine.scheduler.suspects import Suspects
from moe_engine.scheduler.token_ratio import NewTokenRatio
from moe_engine.types import FinishReason, KVReport, Request, StepPlan, StepResult

logger = logging.getLogger("moe_engine")

ABORTED = FinishReason("abort", message="Aborted")


class NeedsResult(enum.Enum):
    """Result of `schedule()`: call `update` with the result of the step in flight, then call `schedule` again."""

    NEEDS_RESULT = "needs drain"


NEEDS_RESULT: Final = NeedsResult.NEEDS_RESULT


class Scheduler:
    """See the module docstring. Not thread-safe; no method blocks.

    Attributes:
        in_flight: planned steps without a result yet, the oldest first.
        suspects: requests of a failed step, which run alone.
        clock: in seconds, of all times of its requests.
        paused_since: begin of a pause of generation, in which no step is planned; None: generation runs.
        last_facts: of the last plan of `schedule`; None if not `keeps_facts`.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.table = RequestTable(config, clock)
        self.kv_cache = self.table.kv_cache
        self._connector = self.kv_cache.connector
        self.ratio = NewTokenRatio(self.table.settings)
        self.speculator = Speculator(config.speculation) if config.speculation is not None else None
        self.last_facts: PlanFacts | None = None
        self.keeps_facts = True
        self.totals = Totals()
        self.clock = clock
        self.autopilot = Autopilot(self.table, self.totals, clock()) if config.autopilot else None
        self.delays = PrefillDelays(config, clock) if config.delays_prefills else None
        self.in_flight: deque[StepRecord] = deque()
        self.suspects = Suspects()
        self.paused_since: float | None = None
        self._suspect_turn = True
        """Steps of suspects alternate with steps of the other requests."""
        self.backoff = AdmissionBackoff()
        parts = self.table, self.suspects, self.ratio, self.backoff, self.totals
        self.prefills = PrefillScheduling(*parts, clock)
        self._decodes = DecodeScheduling(*parts, self.speculator, self.check_integrity)

    # -- add and abort

    def add(self, request: Request) -> list[RequestEvent]:
        """Queues a request. Returns the final event of a less urgent request that it displaced from a full queue.

        Raises:
            InputError: the request could never run, its rid is in use, or the queue is full (status 503).
        """
        events = self.table.add(request, self.clock())
        if self.config.uses_priority:
            self.backoff.retry_now()
        return self.suspects.without_probe(events)

    def abort(self, rids: Iterable[str], reason: FinishReason = ABORTED) -> list[RequestEvent]:
        """Ends these requests, if they have not ended already. Returns the final events of waiting requests, and of
        running requests if no step is in flight; other running requests end in the next `update`."""
        live = self.table.live
        return self._end([live[rid] for rid in dict.fromkeys(rids) if rid in live], reason)

    def abort_all(self, reason: FinishReason = ABORTED) -> list[RequestEvent]:
        """`abort` of every request."""
        return self._end(list(self.table.live.values()), reason)

    def overdue(self, coming: Iterable[Request] = ()) -> list[tuple[list[str], FinishReason]]:
        """Requests over a time limit, to abort now. Call only with limits (`RequestTable.timeouts`).

        Args:
            coming: requests that will be added later; they count as waiting since their `queued_at`.
        """
        assert self.table.timeouts is not None
        found = self.table.timeouts.overdue(chain(self.table.live.values(), coming), self.paused_since)
        for waited, rids, _ in found:
            self.totals.count_timeouts(waited, len(rids))
        return [(rids, reason) for _, rids, reason in found]

    def _end(self, requests: list[Request], reason: FinishReason) -> list[RequestEvent]:
        now = self.clock()
        events = self.table.end_all(requests, reason, now)
        if not self.in_flight:
            events += self.table.end_aborting(now)
            self._reset_if_idle()
        return self.suspects.without_probe(events)

    def step_failed(self, number: int, reason: str) -> list[RequestEvent]:
        """A step raised, and steps planned behind it will not run: their requests are retracted and recomputed from the
        tokens that clients have; the tokens of these steps leave the radix cache. The requests of the failed step
        become suspects, which run alone; a suspect whose own step fails ends with status 500.

        Returns the final events of requests.
        """
        now, records = self.clock(), list(self.in_flight)
        assert records and records[0].number == number
        self._drop_in_flight()
        if self._connector is not None:
            kv_ops = [record.kv_ops for record in records if record.kv_ops is not None]
            self._connector.steps_failed(kv_ops, self.kv_cache.step)
        self.kv_cache.steps_failed(number)
        cause = records[0].alone
        suspects, events, num_retracted = roll_back(self.table, records, now)
        self.totals.retractions += num_retracted
        if cause is None:
            self.suspects.add(suspects)
        else:
            self.suspects.failed(cause)
            events += self.table.end_failed(cause, FinishReason("abort", message=reason, status_code=500), now)
        resend(self.table, records)
        self._suspect_turn = True
        events = self.suspects.without_probe(events)
        probe = self.suspects.make_probe()
        if probe is not None:
            self.table.add(probe, now)
        self._reset_if_idle()
        return events

    def _drop_in_flight(self) -> None:
        """Drops steps in flight and planning pauses; skips a step number, as the worker refuses the next one."""
        self.in_flight.clear()
        self.prefills.drop()
        self.kv_cache.step += 1
        self.backoff.reset()

    @property
    def is_broken(self) -> bool:
        """Whether the step of a probe failed: requests are not the cause."""
        return self.suspects.is_broken

    def start_over(self) -> list[RequestEvent]:
        """Drops steps in flight and the KV cache; running requests are recomputed from the tokens that clients have.

        Returns the final events of requests to abort.
        """
        now = self.clock()
        self._drop_in_flight()
        events = self.table.end_aborting(now)
        self.totals.retractions += self.table.num_running
        self.table.start_over()
        self.kv_cache.retire(self.kv_cache.step)
        return events

    def flush_cache(self, paused: bool = False) -> bool:
        """Clears the radix cache, only when idle; if `paused`, also before waiting requests. True if done."""
        table = self.table
        if not self.is_idle() and (not paused or self.in_flight or self.num_loading or table.num_running):
            logger.warning(log_lines.flush_refused_line(len(table.queue), table.num_running))
            return False
        self.kv_cache.reset()
        logger.info(log_lines.FLUSHED_LINE)
        return True

    def pause(self, retract: bool) -> None:
        """Begins a pause of generation, or changes it: with `retract` every running request returns to the queue. No
        step may be in flight."""
        if self.paused_since is None:
            self.paused_since = self.clock()
        if retract:
            retract_all(self.table, self.totals)

    def resume(self) -> None:
        """Ends a pause of generation, if there is one."""
        if self.paused_since is None:
            return
        now, since, self.paused_since = self.clock(), self.paused_since, None
        for request in self.table.live.values():
            request.paused_seconds += now - max(since, request.clock_began)

    # -- planning

    def schedule(self, hold_prefill: bool = False) -> StepPlan | Literal[NeedsResult.NEEDS_RESULT] | None:
        """The next step; None if no step can be planned now (with a step in flight: before its result; in a pause);
        NEEDS_RESULT if the result of the step in flight must be applied first: memory is short, or most running
        requests end with it.

        Args:
            hold_prefill: no prompts in this step, because other attention groups decode.
        """
        if self.is_paused:
            return None
        if self.in_flight and self.in_flight[-1].alone is not None:
            return self._drain()  # a suspect's step must succeed before another is planned or its KV is cached
        aborting = self.table.aborting
        if aborting and self.in_flight and 2 * len(aborting) > self.table.num_running:
            return self._drain()  # most of a step that is planned now would be for clients that have left
        if self._connector is None and self.delays is None and self._has_nothing_to_plan:
            return None
        self.prefills.cache_prefills()
        if self.kv_cache.storage is not None:
            self.kv_cache.storage.next_step(running=self.table.num_running > 0)
        if not self.suspects:
            plan = self._schedule(hold_prefill)
            if self._connector is not None and not self.in_flight and not isinstance(plan, StepPlan):
                return self.empty_plan() if self._connector.has_new_ops else plan
            return plan
        turns = (self._schedule_alone, self._schedule) if self._suspect_turn else (self._schedule, self._schedule_alone)
        return turns[0](hold_prefill) or turns[1](hold_prefill)

    @property
    def _has_nothing_to_plan(self) -> bool:
        """Whether no request needs a further step."""
        table = self.table
        return not (table.decodes or table.queue.entries or table.chunked or self.prefills.to_cache or self.suspects)

    def _schedule(self, hold_prefill: bool) -> StepPlan | Literal[NeedsResult.NEEDS_RESULT] | None:
        """A step of all requests except suspects."""
        table, draft, num_before, in_flight = self.table, PlanDraft(), self.table.num_running, bool(self.in_flight)
        mixed = self.config.enable_mixed_chunk and not self.prefills.prefill_only
        is_turn = hold_prefill or self._is_decode_turn(mixed)
        batch = PrefillBatch() if mixed or is_turn else self.prefills.build(0, in_flight)
        if batch is None:
            return self._drain()
        if not batch.jobs:
            if table.decodes and not self._decodes.add(draft, in_flight):
                return self._drain()
            all_retracted = not draft.rows and table.num_running < num_before  # for a prompt, which has room now
            if (mixed and not is_turn) or (all_retracted and not hold_prefill):
                batch = self.prefills.build(draft.num_decode_tokens, in_flight)
                if batch is None:
                    return self._drain()
        if batch.jobs:
            self.prefills.add(draft, batch)
        if not draft.rows:
            return None
        self._suspect_turn = True
        self.backoff.count_plan(draft.num_decodes, bool(table.queue.entries) or table.chunked is not None)
        return self._launch(draft, batch, num_before)

    def _schedule_alone(self, hold_prefill: bool) -> StepPlan | Literal[NeedsResult.NEEDS_RESULT] | None:
        """A step of one suspect, without another step in flight; None if no suspect can run now."""
        table, suspects = self.table, self.suspects
        for suspect in suspects.ready(table, hold_prefill):
            if self.in_flight:
                return self._drain()
            draft, batch, num_before = PlanDraft(), PrefillBatch(), table.num_running
            if suspect in table.decodes:
                self._decodes.add(draft, is_in_flight=False, alone=suspect)
            else:
                batch = self.prefills.admit(0, True, partial(operator.is_, suspect))
                suspects.no_room = not batch.jobs
                if batch.jobs:
                    self.prefills.add(draft, batch)
            if draft.rows:
                self._suspect_turn = False
                self.backoff.count_plan(draft.num_decodes, bool(table.queue) or table.chunked is not None)
                return self._launch(draft, batch, num_before, suspect)
        return None

    def empty_plan(self) -> StepPlan:
        """A plan of an idle batch, for a DP group that joins a step of others. Its empty result goes to `update`."""
        return self._launch(PlanDraft(), PrefillBatch(), self.table.num_running)

    def _drain(self) -> Literal[NeedsResult.NEEDS_RESULT]:
        self.totals.drains += 1
        return NeedsResult.NEEDS_RESULT

    def _is_decode_turn(self, mixed: bool) -> bool:
        turn = not mixed and self.backoff.is_decode_turn(self.table.settings.max_consecutive_prefills)
        if self.delays is not None and not turn:
            turn = self.delays.hold(self.table, len(self._decodes.candidates()))
        return turn and bool(self._decodes.candidates())

    def _launch(self, draft: PlanDraft, batch: PrefillBatch, num_before: int, alone: Request | None = None) -> StepPlan:
        table, kv_cache = self.table, self.kv_cache
        kv_cache.step += 1
        follow = self.speculator is not None and self._follows(draft, batch)
        state_ops = kv_cache.take_state_ops(batch.jobs, zip(draft.sampled[: draft.num_decodes], draft.starts))
        # behind the snapshots of this plan: those that they replace are copied to the host first
        kv_ops = self._connector.build_connector_meta() if self._connector is not None else None
        more = kv_ops, kv_cache.take_window_pages(), table.take_lora_loads(), state_ops
        plan, record = draft.finish(kv_cache.step, table.row_writes, table.finished_rows, follow, *more)
        table.row_writes, table.finished_rows, record.alone, record.launched = [], [], alone, self.clock()
        if self.delays is not None:
            self.delays.planned(len(batch.jobs))
        self.in_flight.append(record)
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
        oldest = self.in_flight[0].number if self.in_flight else "none"
        if oldest != result.number:
            raise MoeEngineError(f"got the result of step {result.number}, but the oldest step in flight is {oldest}")
        record = self.in_flight.popleft()
        if self.kv_cache.retire(result.number):
            self.backoff.retry_now()
        if result.kv_done:
            self.kv_arrived(result.kv_done)
        released, now = self.table.num_released, self.clock()
        draft_outcomes: list[DraftOutcome] = []
        events = read_result(self.table, record, result, now, draft_outcomes)
        if self.speculator is not None:
            self.speculator.observe(record, result, draft_outcomes)
        self.totals.generated_tokens += sum([len(event.token_ids) for event in events])
        if self.table.aborting:
            events += self.table.end_aborting(now)
        if result.rows or record.prefilled:
            self.suspects.step_succeeded()
        if record.alone is not None:
            self.suspects.passed(record.alone)
        if self.autopilot is not None:
            blocked, steps = self.prefills.is_out_of_memory, self.backoff.decode_steps
            self.autopilot.after_step(events, now, steps, blocked, bool(record.prefilled))
        if self.table.num_released != released:
            self.rows_released()
        return self.suspects.without_probe(events)

    def rows_released(self) -> None:
        """Requests have ended: there may be room for others, or no request is left."""
        self.backoff.retry_now()
        self._reset_if_idle()

    def kv_arrived(self, kv_done: Sequence[int], reports: Sequence[KVReport] = ()) -> None:
        """Applies loads that the worker has completed, and progress of the storage (the minimum over all ranks)."""
        self.kv_cache.kv_arrived(kv_done, reports)
        self.backoff.retry_now()
        self._reset_if_idle()

    # -- state

    @property
    def is_paused(self) -> bool:
        """Whether generation is paused."""
        return self.paused_since is not None

    @property
    def num_loading(self) -> int:
        """Loads and transfers of KV in progress."""
        return self._connector.num_loading + self.kv_cache.num_transfers if self._connector is not None else 0

    @property
    def num_in_flight(self) -> int:
        """Planned steps without a result yet."""
        return len(self.in_flight)

    @property
    def last_sampled(self) -> list[Request]:
        """Requests that sample in the last plan of `schedule()`, in order."""
        return self.in_flight[-1].sampled if self.in_flight else []

    @property
    def is_held_back(self) -> bool:
        """Whether requests wait only because the KV of sessions is held: they may run later without any event."""
        return self.table.sessions.holds_back and bool(self.table.queue)

    @property
    def num_waiting(self) -> int:
        """Requests with prompt tokens that are not planned yet."""
        return len(self.table.queue.entries) + (self.table.chunked is not None)

    def is_idle(self) -> bool:
        """Whether there is no request, no step in flight and no load of KV."""
        return not self.table.live and not self.in_flight and not self.num_loading

    def _reset_if_idle(self) -> None:
        """When idle, resets the ratio and compares counts; runs the full integrity check only if they disagree."""
        if not self.is_idle():
            return
        self.ratio.reset()
        self.backoff.reset()
        if not self.kv_cache.is_released:
            self.check_integrity()

    def check_integrity(self) -> list[str]:
        """Recounts slots, rows, locks and users of adapters, repairs errors, logs and returns the findings. Walks the
        whole pool: for idle times and tests."""
        live = self.table.live.values()
        findings = check_integrity(self.kv_cache, live)
        findings += self.table.lora.check_integrity(live) if self.table.lora is not None else []
        for finding in findings:
            logger.warning("KV bookkeeping repaired: %s", finding)
        return findings

    def stats(self) -> SchedulerStats:
        speculation = self.speculator.stats() if self.speculator is not None else None
        delayer = self.delays.state() if self.delays is not None else None
        return snapshot(self.table, self.totals, self.ratio.value, self.clock(), speculation, delayer)
