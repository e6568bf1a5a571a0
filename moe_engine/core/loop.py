"""Engine core loop (overlap schedule): messages -> scheduler -> worker -> events. One step in flight by default.

While step N runs on the worker's thread, this thread plans step N+1 (tokens sampled by N stay on the device), then
takes N's result, appends its tokens and sends one message. The core never handles tensors.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from moe_engine.core import messages
from moe_engine.core.core_methods import NO_METHODS, CoreMethod, NoArgs, PauseArgs
from moe_engine.core.deltas import DeltaSender
from moe_engine.core.dp_sync import DPSync
from moe_engine.core.executor import StepWorker
from moe_engine.core.kv_arrivals import KVArrivals
from moe_engine.core.late_masks import LateMasks
from moe_engine.core.pending_calls import PendingCalls
from moe_engine.core.request_receiver import RequestReceiver
from moe_engine.core.shared_status import SharedStatus
from moe_engine.core.status_writer import StatusWriter
from moe_engine.core.step_reporter import StepReporter
from moe_engine.errors import EngineDeadError, MoeEngineError
from moe_engine.scheduler.scheduler import NEEDS_RESULT, Scheduler
from moe_engine.structured_output.compiler import GrammarCompiler
from moe_engine.types import FinishReason, StepFacts, StepPlan, StepResult

logger = logging.getLogger("moe_engine")

IDLE_POLL_SECONDS = 0.2
"""Interval of an idle core's liveness updates in the shared status."""
HANDOVER_SECONDS = 20e-6
"""Pause of the loop after the first step of an idle engine. Without it this thread would keep the GIL while it looks
for another plan, and the worker's thread would start the forward only then."""
MASKED_HANDOVER_SECONDS = 400e-6
"""The same pause if the step has masks: this thread computes them while the forward runs, not while the worker's thread
builds the batch. Without it the first token of a constrained request comes 0.2 ms later."""
CALL_POLL_SECONDS = 0.005
"""Poll interval of an idle core for its ranks' replies to a call."""
STORAGE_POLL_SECONDS = 0.02
"""Poll interval of an idle core while requests wait for the storage or for held sessions, which have deadlines."""
SHUTTING_DOWN = FinishReason("abort", message="the server is shutting down", status_code=503)


class CoreTransport(Protocol):
    """Messages to and from the frontend."""

    def receive(self, timeout: float) -> list[messages.Message]:
        """All queued messages; waits up to `timeout` seconds for the first one."""

    def send(self, message: messages.Message) -> None: ...

    def wake(self) -> None:
        """Ends a wait of `receive`, or the next one. Thread-safe."""


@dataclass(frozen=True)
class LoopSettings:
    """What the launch decides about the loop of a core.

    Attributes:
        eos_token_ids: of the model.
        overlap: the next step is planned while the current one runs.
        group: attention group that the core serves, of its replica.
        first_half: tokens of a plan's first half for two-batch overlap; 0: not split.
        problem_of: why a plan must not run, or None; such a plan fails before any rank has begun it.
    """

    eos_token_ids: frozenset[int]
    overlap: bool = True
    group: int = 0
    first_half: Callable[[StepPlan], int] = lambda plan: 0
    problem_of: Callable[[StepPlan], str | None] = lambda plan: None


class EngineCore:
    """Drives a scheduler and a worker until shutdown."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: StepWorker,
        transport: CoreTransport,
        status: SharedStatus,
        reporter: StepReporter,
        settings: LoopSettings,
        *,
        worker_stats: Callable[[], dict[str, Any]] = dict,
        check: Callable[[], None] = lambda: None,
        dp_sync: DPSync | None = None,
        methods: Mapping[str, CoreMethod] = NO_METHODS,
        kv_arrivals: KVArrivals | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """
        Args:
            worker: runs the steps; `worker_stats`: values of it that change while serving, for metrics.
            check: called every iteration; raises `EngineDeadError` if a rank behind the worker is lost.
            dp_sync: step sync with the schedulers of the other attention groups; None with a single group.
            methods: further methods that the frontend may call.
            kv_arrivals: loads of KV that end after their step's result; None without a KV connector.
            grammars: compiles the constraints of requests; None: such requests are refused.
        """
        self._scheduler = scheduler
        self._worker = worker
        self._transport = transport
        self._reporter = reporter
        self._settings = settings
        self._worker_stats = worker_stats
        self._check = check
        self._dp_sync = dp_sync
        self._kv_arrivals = kv_arrivals
        self._waits_for_kv = False
        self._late_masks = LateMasks(worker, scheduler.config.vocab_size, self._masks_failed, scheduler.table.jumps)
        self._output = DeltaSender(transport.send, settings.group)
        self._requests = RequestReceiver(
            scheduler, self._late_masks, self._output, settings.eos_token_ids, grammars, transport.wake
        )
        if dp_sync is not None:
            dp_sync.use(scheduler.delays)
        self._status = StatusWriter(status, scheduler, reporter)
        own_methods = {
            "flush_cache": CoreMethod(self._flush_cache),
            "pause": CoreMethod(self._pause, PauseArgs),
            "resume": CoreMethod(lambda _: self._scheduler.resume()),
            "internal_state": CoreMethod(self._internal_state),
            "check_integrity": CoreMethod(lambda _: self._scheduler.check_integrity()),
            "is_idle": CoreMethod(
                lambda _: self._in_flight is None and self._scheduler.is_idle() and not self._requests
            ),
        }
        self._calls = PendingCalls(worker, {**own_methods, **methods}, transport.send)
        self._in_flight: tuple[StepPlan, Future[StepResult]] | None = None
        self._stopping: messages.Shutdown | None = None

    def run(self) -> None:
        """Serves until a `Shutdown`. Raises unrecoverable errors; the frontend then fails all requests."""
        while True:
            self._check()
            no_steps = self._in_flight is None and self._scheduler.is_idle()
            idle = no_steps and not self._requests
            if self._has_ended(idle):
                return
            self._status.turn(busy=not idle and not self._scheduler.is_paused and not self._only_waits())
            timeout = self._poll_seconds() if self._may_wait(no_steps, idle) else 0.0
            for message in self._transport.receive(timeout):
                self._handle(message)
            self._calls.answer()
            self._requests.enter_ready()
            if self._scheduler.table.timeouts is not None:
                self._requests.abort_overdue()
            if self._kv_arrivals is not None:
                loads, reports = self._kv_arrivals.take(), self._kv_arrivals.take_storage()
                if loads or reports:
                    self._scheduler.kv_arrived(loads, reports)
            self._step()
            self._waits_for_kv = self._in_flight is None and self._is_waiting()

    def _may_wait(self, no_steps: bool, idle: bool) -> bool:
        """Whether the next turn has nothing to do before a message arrives."""
        if self._scheduler.is_paused and self._in_flight is None:
            return True
        if self._scheduler.kv_cache.has_kv_ops:
            return False
        return self._waits_for_kv or (no_steps and not (idle and self._stopping))

    def _is_waiting(self) -> bool:
        """Whether requests wait for KV, or for sessions whose KV is held."""
        scheduler = self._scheduler
        if scheduler.is_held_back:
            return True
        return self._kv_arrivals is not None and (scheduler.num_loading > 0 or scheduler.kv_cache.num_fetching() > 0)

    def _only_waits(self) -> bool:
        """Whether all requests wait for transfers, reads of the storage or held sessions, which have their own time
        limits: that is no stall. A load from host RAM that does not end is one."""
        scheduler = self._scheduler
        if scheduler.table.num_running or not self._waits_for_kv:
            return False
        return scheduler.num_loading <= scheduler.kv_cache.num_transfers

    def _poll_seconds(self) -> float:
        """Timeout of `receive`."""
        if self._calls:
            return CALL_POLL_SECONDS
        if self._scheduler.is_held_back:
            return STORAGE_POLL_SECONDS
        storage = self._scheduler.kv_cache.storage
        if storage is None or not storage.num_open or self._kv_arrivals is None:
            return IDLE_POLL_SECONDS
        return CALL_POLL_SECONDS if self._kv_arrivals.polls else STORAGE_POLL_SECONDS

    def start_over(self) -> None:
        """After `run` has raised: running requests return to the queue and are computed again by the next `run`."""
        self._late_masks.abandon()
        self._in_flight = None
        self._output.publish(self._scheduler.start_over())
        self._reporter.restart()

    def _has_ended(self, idle: bool) -> bool:
        """Whether shutdown was requested and no attention group has work left."""
        if self._stopping is None:
            return False
        if self._dp_sync is None:
            return idle
        if self._dp_sync.all_leave():
            self._collect()
            return True
        return False

    # -- one iteration

    def _step(self) -> None:
        hold = self._dp_sync is not None and not self._dp_sync.may_prefill()
        plan = self._scheduler.schedule(hold)  # None in a pause: steps of other attention groups are joined
        if plan is NEEDS_RESULT:
            self._collect()
            return
        assert plan is None or isinstance(plan, StepPlan)
        problem = self._settings.problem_of(plan) if plan is not None else None
        if plan is not None and problem is not None:  # no rank has begun it
            if self._collect():
                self._step_failed(plan, MoeEngineError(problem), None)
            return
        if self._dp_sync is not None:
            plan = self._agree(self._dp_sync, plan)
        launched = None
        if plan is not None:
            self._reporter.planned(self._scheduler)
            if self._late_masks.states and (rows := self._late_masks.rows_of(self._scheduler.last_sampled)):
                plan.masked.extend(rows)
                launched = (plan, self._late_masks.launch(plan, self._scheduler.last_sampled))
            else:
                launched = (plan, self._worker.execute(plan))
        self._collect(behind=launched)

    def _agree(self, dp_sync: DPSync, plan: StepPlan | None) -> StepPlan | None:
        """The plan with all groups' facts; an idle batch to join a step of other groups; None if no group has work."""
        scheduler = self._scheduler
        leaving = self._stopping is not None and not scheduler.table.live and not self._requests
        num_waiting = 0 if scheduler.is_paused else scheduler.num_waiting
        if plan is None:
            waits_for_turn = num_waiting and not dp_sync.may_prefill()
            if not leaving and not waits_for_turn and not dp_sync.is_due():
                return None
            plan = scheduler.empty_plan()
        about, delays = scheduler.last_facts, scheduler.delays
        facts = StepFacts.of(
            plan,
            prompt_logprobs=about is not None and about.prompt_logprobs,
            first_half=self._settings.first_half(plan),
            num_running=len(scheduler.table.decodes),
            num_waiting=num_waiting,
            leaving=leaving,
            delay=delays.facts(scheduler.table, scheduler.is_paused) if delays is not None else None,
        )
        return dp_sync.sync_step(plan, facts)

    def _collect(self, behind: tuple[StepPlan, Future[StepResult]] | None = None) -> bool:
        """Waits for the step in flight, if any, and sends its output; then `behind` is in flight. Without overlap it
        waits for `behind` too. False if a step failed."""
        if self._in_flight is not None:
            plan, future = self._in_flight
            self._in_flight = None
            try:
                result = future.result()
            except EngineDeadError:
                raise
            except Exception as error:
                self._step_failed(plan, error, behind[1] if behind is not None else None)
                return False
            self._output.publish(self._scheduler.update(result))
            self._reporter.finished(result, self._scheduler.speculator)
            self._status.step_ended(plan.number)
        elif behind is not None and self._settings.overlap:
            time.sleep(MASKED_HANDOVER_SECONDS if behind[0].masked else HANDOVER_SECONDS)
        self._in_flight = behind
        if behind is not None and behind[0].masked:
            self._late_masks.send()
        return behind is None or self._settings.overlap or self._collect()

    def _step_failed(self, plan: StepPlan, error: Exception, behind: Future[StepResult] | None) -> None:
        """A step raised: its requests are retried one at a time (`Scheduler.step_failed`).

        Args:
            behind: the step planned after it. Its result is discarded.
        """
        if behind is not None:
            self._late_masks.abandon()
            try:
                behind.result()
            except EngineDeadError:
                raise
            except Exception as echo:
                logger.debug("Step %d, planned behind it, failed too: %s", plan.number + 1, echo)
        self._reporter.restart()
        logger.error("Step %d failed: %s\n%s", plan.number, error, "".join(traceback.format_exception(error)))
        reason = f"step {plan.number} failed: {type(error).__name__}: {error}"
        self._output.publish(self._scheduler.step_failed(plan.number, reason))
        if self._scheduler.is_broken:
            message = "consecutive steps of different requests failed, and then the step of a one-token probe"
            raise RuntimeError(f"{message}: {reason}") from error

    # -- messages

    def _handle(self, message: messages.Message) -> None:
        if isinstance(message, messages.AddRequest):
            self._requests.add(message)
        elif isinstance(message, messages.AddRequests):
            for request in message.requests:
                self._requests.add(request)
        elif isinstance(message, messages.AbortRequest):
            self._requests.abort(message.rids, FinishReason("abort", message=message.reason))
        elif isinstance(message, messages.Call):
            self._calls.begin(message)
        elif isinstance(message, messages.Shutdown):
            self._stopping = message
            self._scheduler.resume()
            if not message.drain:
                self._requests.abort(None, SHUTTING_DOWN)

    def _masks_failed(self, rid: str, reason: str, status: int) -> None:
        self._output.publish(self._scheduler.abort([rid], FinishReason("abort", message=reason, status_code=status)))

    # -- methods of the core

    def _pause(self, args: PauseArgs) -> None:
        """Pauses steps: none of this group's requests runs once the call has returned."""
        self._collect()
        self._scheduler.pause(args.retract)

    def _flush_cache(self, _: NoArgs) -> bool:
        return self._in_flight is None and self._scheduler.flush_cache(self._scheduler.is_paused)

    def _internal_state(self, _: NoArgs) -> dict[str, Any]:
        stats = self._scheduler.stats()
        state = asdict(stats) | self._reporter.state() | self._worker_stats() | {"paused": self._scheduler.is_paused}
        if self._dp_sync is not None:
            state["alive_groups"] = self._dp_sync.num_groups
        if stats.speculation is not None:
            state["avg_spec_accept_length"] = stats.speculation.accept_length
            state["spec_accept_rates"] = stats.speculation.accept_rates
        return state
