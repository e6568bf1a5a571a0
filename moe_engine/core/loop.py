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
from dataclasses import asdict
from typing import Any, Protocol

import msgspec

from moe_engine.core import messages
from moe_engine.core.bad_words import BadWords
from moe_engine.core.core_methods import NO_METHODS, CoreMethod, NoArgs, PauseArgs
from moe_engine.core.deltas import deltas_of
from moe_engine.core.dp_sync import DPSync
from moe_engine.core.executor import StepWorker
from moe_engine.core.grammar_queue import GrammarQueue, grammar_of
from moe_engine.core.kv_arrivals import KVArrivals
from moe_engine.core.late_masks import LateMasks, PositionMasks
from moe_engine.core.rank_calls import RankCall, describe
from moe_engine.core.shared_status import SharedStatus
from moe_engine.core.step_reporter import StepReporter
from moe_engine.errors import EngineDeadError, InputError, MoeEngineError
from moe_engine.scheduler.events import RequestEvent
from moe_engine.scheduler.retraction import retract_all
from moe_engine.scheduler.scheduler import NEEDS_RESULT, Scheduler
from moe_engine.structured_output.backend import CompiledGrammar
from moe_engine.structured_output.compiler import GrammarCompiler
from moe_engine.types import (
    FinishReason,
    LogprobSpec,
    Request,
    SamplingParams,
    StepFacts,
    StepPlan,
    StepResult,
)

logger = logging.getLogger("moe_engine")

IDLE_POLL_SECONDS = 0.2
"""Interval of an idle core's liveness updates in the shared status."""
CALL_POLL_SECONDS = 0.005
"""Poll interval of an idle core for its ranks' replies to a call."""
STORAGE_POLL_SECONDS = 0.02
"""Of an idle core while requests wait for the storage, or for held sessions: their deadlines."""
STATUS_INTERVAL_SECONDS = 0.05
SHUTTING_DOWN = FinishReason("abort", message="the server is shutting down", status_code=503)


PendingCall = Future[Any] | RankCall


class CoreTransport(Protocol):
    """Messages to and from the front end."""

    def receive(self, timeout: float) -> list[messages.Message]:
        """All queued messages; waits up to `timeout` seconds for the first one."""

    def send(self, message: messages.Message) -> None: ...

    def wake(self) -> None:
        """Ends a wait of `receive`, or the next one. Thread-safe."""


class EngineCore:
    """Drives a scheduler and a worker until shutdown."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: StepWorker,
        transport: CoreTransport,
        status: SharedStatus,
        reporter: StepReporter,
        *,
        eos_token_ids: frozenset[int],
        overlap: bool = True,
        worker_stats: Callable[[], dict[str, Any]] = dict,
        check: Callable[[], None] = lambda: None,
        dp_sync: DPSync | None = None,
        first_half: Callable[[StepPlan], int] = lambda plan: 0,
        problem_of: Callable[[StepPlan], str | None] = lambda plan: None,
        methods: Mapping[str, CoreMethod] = NO_METHODS,
        group: int = 0,
        kv_arrivals: KVArrivals | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """
        Args:
            check: called every iteration; raises `EngineDeadError` if a rank behind the worker is lost.
            first_half: tokens of a plan's first half for two-batch overlap; 0: not split.
            problem_of: why a plan must not run, or None; such a plan fails before any rank has begun it.
            dp_sync: step sync with the schedulers of the other attention groups; None with a single group.
            methods: further methods that the front end may call.
            group: attention group that this core serves.
            kv_arrivals: loads of KV that end after their step's result; None without a KV connector.
            grammars: compiles the constraints of requests; None: such requests are refused.
        """
        self._scheduler = scheduler
        self._worker = worker
        self._transport = transport
        self._status = status
        self._reporter = reporter
        self._eos = eos_token_ids
        self._overlap = overlap
        self._worker_stats = worker_stats
        self._check = check
        self._dp_sync = dp_sync
        self._first_half = first_half
        self._problem_of = problem_of
        self._group = group
        self._kv_arrivals = kv_arrivals
        self._waits_for_kv = False
        self._late_masks = LateMasks(worker, scheduler.config.vocab_size, self._masks_failed, scheduler.table.jumps)
        self._grammars = GrammarQueue(grammars, transport.wake)
        self._calls: list[tuple[int, PendingCall]] = []  # begun, without a reply yet
        self._methods = {
            "flush_cache": CoreMethod(self._flush_cache),
            "pause": CoreMethod(self._pause, PauseArgs),
            "resume": CoreMethod(self._resume),
            "internal_state": CoreMethod(self._internal_state),
            "check_integrity": CoreMethod(lambda _: self._scheduler.check_integrity()),
            "is_idle": CoreMethod(
                lambda _: self._in_flight is None and self._scheduler.is_idle() and not self._grammars
            ),
            **methods,
        }
        self._in_flight: tuple[StepPlan, Future[StepResult]] | None = None
        self._stopping: messages.Shutdown | None = None
        self._paused = False
        """No step is planned. Steps of other attention groups are joined."""
        self._busy = False
        self._step_number = 0
        self._status_written = 0.0

    def run(self) -> None:
        """Serves until a `Shutdown`. Raises unrecoverable errors; the front end then fails all requests."""
        while True:
            self._check()
            no_steps = self._in_flight is None and self._scheduler.is_idle()
            idle = no_steps and not self._grammars
            if self._has_ended(idle):
                return
            self._note_busy(not idle and not self._paused)
            self._status.write(last_turn=time.monotonic())
            may_wait = (no_steps and (not idle or not self._stopping)) or self._waits_for_kv
            may_wait = (may_wait and not self._scheduler.kv_cache.has_kv_ops) or (
                self._paused and self._in_flight is None
            )
            timeout = self._poll_seconds()
            for message in self._transport.receive(timeout if may_wait else 0.0):
                self._handle(message)
            self._answer_calls()
            if self._grammars:
                self._enter_ready()
            if (timeouts := self._scheduler.table.timeouts) is not None:
                for rids, reason in timeouts.overdue(self._scheduler.table.live.values()):
                    self._publish(self._scheduler.abort(rids, reason))
            if self._kv_arrivals is not None:
                loads, reports = self._kv_arrivals.take(), self._kv_arrivals.take_storage()
                if loads or reports:
                    self._scheduler.kv_arrived(loads, reports)
            self._step()
            self._waits_for_kv = self._in_flight is None and self._is_waiting()

    def _is_waiting(self) -> bool:
        """Whether requests wait for KV, or for sessions whose KV is held."""
        scheduler = self._scheduler
        if scheduler.table.sessions.holds_back:
            return True
        return self._kv_arrivals is not None and (scheduler.num_loading > 0 or scheduler.kv_cache.num_fetching() > 0)

    def _poll_seconds(self) -> float:
        """How long `receive` waits."""
        if self._calls:
            return CALL_POLL_SECONDS
        if self._scheduler.table.sessions.holds_back:
            return STORAGE_POLL_SECONDS
        storage = self._scheduler.kv_cache.storage
        if storage is None or not storage.num_open or self._kv_arrivals is None:
            return IDLE_POLL_SECONDS
        return CALL_POLL_SECONDS if self._kv_arrivals.polls else STORAGE_POLL_SECONDS

    def start_over(self) -> None:
        """After `run` has raised: running requests return to the queue and are computed again by the next `run`."""
        self._late_masks.abandon()
        self._in_flight = None
        self._publish(self._scheduler.start_over())
        self._reporter.restart()

    def _has_ended(self, idle: bool) -> bool:
        """Whether shutdown was requested and no work is left, in the other attention groups either."""
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
        plan = self._scheduler.schedule(hold) if not self._paused else None
        if plan is NEEDS_RESULT:
            self._collect()
            return
        assert plan is None or isinstance(plan, StepPlan)
        problem = self._problem_of(plan) if plan is not None else None
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
        leaving = self._stopping is not None and not scheduler.table.live and not self._grammars
        num_waiting = 0 if self._paused else scheduler.num_waiting
        if plan is None:
            waits_for_turn = num_waiting and not dp_sync.may_prefill()
            if not leaving and not waits_for_turn and not dp_sync.is_due():
                return None
            plan = scheduler.empty_plan()
        about = scheduler.last_facts
        facts = StepFacts.of(
            plan,
            prompt_logprobs=about is not None and about.prompt_logprobs,
            first_half=self._first_half(plan),
            num_running=len(scheduler.table.decodes),
            num_waiting=num_waiting,
            leaving=leaving,
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
            self._publish(self._scheduler.update(result))
            self._reporter.finished(result, self._scheduler.speculator)
            self._step_number = plan.number
            self._write_status(counts=time.monotonic() - self._status_written > STATUS_INTERVAL_SECONDS)
        self._in_flight = behind
        if behind is not None and behind[0].masked:
            self._late_masks.send()
        return behind is None or self._overlap or self._collect()

    def _step_failed(self, plan: StepPlan, error: Exception, behind: Future[StepResult] | None) -> None:
        """A step raised: its requests are retried one at a time (`Scheduler.step_failed`).

        Args:
            behind: the step planned behind it. Its result is discarded.
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
        self._publish(self._scheduler.step_failed(plan.number, reason))
        if self._scheduler.is_broken:
            message = "consecutive steps of different requests failed, and then the step of a one-token probe"
            raise RuntimeError(f"{message}: {reason}") from error

    # -- messages

    def _handle(self, message: messages.Message) -> None:
        if isinstance(message, messages.AddRequest):
            self._add(message)
        elif isinstance(message, messages.AbortRequest):
            reason = FinishReason("abort", message=message.reason)
            self._abort_compiling(message.rids, reason)
            self._publish(self._scheduler.abort(message.rids, reason))
        elif isinstance(message, messages.Call):
            self._called(message)
        elif isinstance(message, messages.Shutdown):
            self._stopping = message
            self._paused = False
            if not message.drain:
                self._abort_compiling(None, SHUTTING_DOWN)
                self._publish(self._scheduler.abort_all(SHUTTING_DOWN))

    def _add(self, message: messages.AddRequest) -> None:
        try:
            request = self._request(message)
        except msgspec.ValidationError as error:
            self._refuse(message.rid, InputError(f"sampling_params: {error}"))
            return
        if request.sampling.constraint is None:
            self._enter(request)
            return
        try:
            self._grammars.add(request)
        except InputError as error:
            self._refuse(message.rid, error)

    def _enter(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        try:
            self._publish(self._scheduler.add(request))
        except InputError as error:
            self._refuse(request.rid, error)
            return
        sampling = request.sampling
        if sampling.needs_late_masks:
            masks: list[PositionMasks] = []
            if sampling.bad_word_ids:
                masks.append(BadWords(sampling.bad_word_ids))
            if grammar is not None and sampling.constraint is not None:
                masks.append(grammar.matcher(sampling.constraint.reasoning))
            self._late_masks.add(request, *masks)

    def _enter_ready(self) -> None:
        """Requests whose grammars are compiled."""
        for request, future in self._grammars.take():
            try:
                grammar = grammar_of(request, future)
            except InputError as error:
                self._refuse(request.rid, error)
                continue
            self._enter(request, grammar)

    def _abort_compiling(self, rids: list[str] | None, reason: FinishReason) -> None:
        if self._grammars and (gone := self._grammars.abort(rids)):
            self._send_deltas([messages.RequestDelta(rid, [], reason.to_dict()) for rid in gone])

    def _masks_failed(self, rid: str, reason: str, status: int) -> None:
        self._publish(self._scheduler.abort([rid], FinishReason("abort", message=reason, status_code=status)))

    def _refuse(self, rid: str, error: InputError) -> None:
        finish = FinishReason("abort", message=error.message, status_code=error.status)
        self._send_deltas([messages.RequestDelta(rid, [], finish.to_dict())])

    def _called(self, call: messages.Call) -> None:
        """Begins a call; `_answer_calls` sends the reply of one that is not finished at once."""
        try:
            if call.on_ranks:
                self._calls.append((call.id, self._worker.call_ranks(call.method, call.args, call.deadline)))
                return
            method = self._methods.get(call.method)
            if method is None:
                raise MoeEngineError(f"unknown call {call.method!r}")
            value = method.call(call.args)
        except EngineDeadError:
            raise
        except Exception as error:
            self._transport.send(messages.Reply(id=call.id, ok=False, value=f"{call.method}: {describe(error)}"))
            return
        if isinstance(value, Future):
            self._calls.append((call.id, value))
        else:
            self._transport.send(messages.Reply(id=call.id, value=value))

    def _request(self, message: messages.AddRequest) -> Request:
        logprobs = None
        if message.return_logprob:
            logprobs = LogprobSpec(message.logprob_start, message.top_logprobs, tuple(message.token_ids_logprob))
        return Request(
            rid=message.rid,
            prompt_ids=message.prompt_ids,
            sampling=msgspec.convert(message.sampling, SamplingParams),
            max_new_tokens=message.max_new_tokens,
            eos_token_ids=self._eos,
            priority=message.priority,
            arrival=message.arrival or time.monotonic(),
            logprobs=logprobs,
            extra_key=message.extra_key,
            lora_id=message.lora_id,
            lora_key=message.lora_key,
            lora_pinned=message.lora_pinned,
            bootstrap=message.bootstrap,
            hidden=[] if message.return_hidden_states else None,
            seed=message.seed,
            output_ids=list(message.generated_ids),
            retractions=int(message.num_migrations),
        )

    def _answer_calls(self) -> None:
        """Sends the replies of finished calls."""
        waiting: list[tuple[int, PendingCall]] = []
        for call_id, call in self._calls:
            reply = _reply_of(call_id, call)
            if reply is None:
                waiting.append((call_id, call))
            else:
                self._transport.send(reply)
        self._calls = waiting

    def _pause(self, args: PauseArgs) -> None:
        """No step of this group's requests runs when the call has returned."""
        self._collect()
        self._paused = True
        if args.retract:
            retract_all(self._scheduler.table, self._scheduler.totals)

    def _resume(self, _: NoArgs) -> None:
        self._paused = False

    def _flush_cache(self, _: NoArgs) -> bool:
        return self._in_flight is None and self._scheduler.flush_cache(self._paused)

    def _internal_state(self, _: NoArgs) -> dict[str, Any]:
        stats = self._scheduler.stats()
        state = asdict(stats) | self._reporter.state() | self._worker_stats() | {"paused": self._paused}
        if self._dp_sync is not None:
            state["alive_groups"] = self._dp_sync.num_groups
        if stats.speculation is not None:
            state["avg_spec_accept_length"] = stats.speculation.accept_length
            state["spec_accept_rates"] = stats.speculation.accept_rates
        return state

    # -- output

    def _publish(self, events: list[RequestEvent]) -> None:
        if events:
            self._send_deltas(deltas_of(events))

    def _send_deltas(self, deltas: list[messages.RequestDelta]) -> None:
        self._transport.send(messages.StepOutput(deltas=deltas, group=self._group))

    def _note_busy(self, busy: bool) -> None:
        if busy != self._busy:
            self._busy = busy
            self._status.write(busy_since=time.monotonic() if busy else 0.0)
            if not busy:
                self._reporter.idle()
                self._write_status(counts=True)

    def _write_status(self, *, counts: bool) -> None:
        if not counts:
            self._status.write(step=self._step_number, step_end=time.monotonic())
            return
        stats = self._scheduler.stats()
        now = self._status_written = time.monotonic()
        self._status.write(
            step=self._step_number,
            step_end=now,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_used_tokens=stats.num_used,
            token_usage=stats.token_usage,
            gen_throughput=self._reporter.gen_throughput,
            cache_hit_rate=stats.cache_hit_rate,
            num_retracted=stats.num_retracted,
            new_token_ratio=stats.new_token_ratio,
            oldest_queued=now - stats.oldest_wait_seconds if stats.num_waiting else 0.0,
        )


def _reply_of(call_id: int, call: PendingCall) -> messages.Reply | None:
    """The reply of a call that has ended, else None."""
    if isinstance(call, RankCall):
        answers = call.answers()
        return None if answers is None else messages.Reply(id=call_id, value=answers)
    if not call.done():
        return None
    error = call.exception()
    value = call.result() if error is None else describe(error)
    return messages.Reply(id=call_id, ok=error is None, value=value)
