"""Executor of a rank group, leader side: broadcasts every plan to the followers, runs it locally, returns the local
result.

All ranks run the same plans in the same order, each on its own shards, and synchronize in the collectives. A step that
fails on one rank leaves the others blocked in a collective, so a failure stops the whole group; the error names the
rank at fault.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from moe_engine.core.executor import RankLost
from moe_engine.core.rank_calls import RankAnswer, RankCall
from moe_engine.errors import ConfigError, EngineDeadError, MoeEngineError, StepNotRun
from moe_engine.executor.plan_broadcast import KV_REPORT, PlanSender
from moe_engine.executor.progress import Progress
from moe_engine.types import KVReport, StepPlan, StepResult
from moe_engine.types.token_masks import LaunchedStep, StepMasks

if TYPE_CHECKING:
    from moe_engine.worker.worker import Worker

MAX_AHEAD = 64
"""Max steps between the leader and its slowest follower; collectives usually keep it at one."""


@dataclass(frozen=True)
class Failure:
    """Why a rank cannot continue. `peer_lost`: caused by another rank, or already reported; `config_error`: a user
    error."""

    message: str
    peer_lost: bool = False
    config_error: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        from moe_engine.parallel.collectives import PeerLost  # imports torch; loaded already where it can occur

        message = str(error) if isinstance(error, MoeEngineError) else f"{type(error).__name__}: {error}"
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, PeerLost | StepNotRun):
            cause = cause.__cause__
        return cls(message, cause is not None, isinstance(error, ConfigError))


def kernels_of(worker: Worker) -> dict[str, str]:
    """The chosen backends by kernel family."""
    return {choice.family: choice.row.name for choice in worker.info.choices}


class Detector(Protocol):
    """The failure detector as `LeaderWorker` uses it. `failure`: the error that stops the group, or None."""

    failure: RankLost | None

    def slowest_steps_done(self) -> int:
        """Steps that every follower has finished."""

    def failed(self, rank: int, message: str, *, peer_lost: bool) -> None:
        """Reports that a rank's step raised; `peer_lost`: because of another rank, which the detector identifies."""

    def stepped(self, seconds: float) -> None:
        """Reports a step's duration, from which the limit for late ranks is derived."""

    def on_failure(self, listener: Callable[[RankLost], None]) -> None: ...


class LeaderWorker:
    """`StepWorker` of `core.executor` for a rank that schedules. Call its methods from one thread.

    A future fails with `RankLost` as soon as the detector has identified the lost rank, even if the local step hangs in
    a collective for longer.

    Args:
        rank: this rank's number.
        followers: the numbers of the group's other ranks.
    """

    def __init__(
        self,
        worker: Worker,
        sender: PlanSender,
        detector: Detector,
        progress: Progress,
        *,
        rank: int = 0,
        followers: Sequence[int] = (),
    ) -> None:
        self._rank, self._followers = rank, followers
        self._worker = worker
        self._calls: dict[int, RankCall] = {}
        self._call_ids = itertools.count()
        self._kv_reports: list[tuple[int, KVReport]] = []
        self._sender = sender
        self._detector = detector
        self._progress = progress
        self._lock = threading.Lock()
        self._waiting: list[Future[StepResult]] = []
        detector.on_failure(self._fail)

    def check(self) -> None:
        """Raises `RankLost` if a rank is lost. For a core without a step in flight."""
        if self._detector.failure is not None:
            raise self._detector.failure

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """Runs a step on all ranks; the future holds the local result, or the `RankLost` that stopped the group."""
        future: Future[StepResult] = Future()
        if self._begin(plan, future):
            began = time.monotonic()
            local = self._worker.execute(plan)
            local.add_done_callback(lambda done: self._ended(done, future, began))
        return future

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """As `execute`, up to the sampling, which waits for `sample`."""
        future: Future[StepResult] = Future()
        step = LaunchedStep(plan.number)
        step.follow(future)
        if self._begin(plan, future):
            began = time.monotonic()
            local = self._worker.launch(plan)
            local.drafts.add_done_callback(lambda done: step.report(done.result()))
            local.result.add_done_callback(lambda done: self._ended(done, future, began))
        return step

    def sample(self, masks: StepMasks) -> None:
        """Completes the launched step on all ranks."""
        self._sender.send_masks(masks)
        self._worker.sample(masks)

    def abandon(self) -> None:
        """The launched step fails on this rank; the failure stops the group."""
        self._worker.abandon()

    def _begin(self, plan: StepPlan, future: Future[StepResult]) -> bool:
        """Sends a plan to the followers; False if a rank is lost, which the future reports."""
        with self._lock:
            self._waiting.append(future)
        if (failure := self._wait_for_followers()) is not None:
            self._fail(failure)
            return False
        self._sender.send(plan)
        self._progress.begin(plan)
        return True

    def call_ranks(self, method: str, args: Mapping[str, Any], seconds: float) -> RankCall:
        """Begins one of `worker.rank_methods` on every rank of the group, after the steps submitted so far."""
        self._calls = {number: call for number, call in self._calls.items() if not call.is_over}
        number = next(self._call_ids)
        call = self._calls[number] = RankCall([self._rank, *self._followers], seconds, self._take_answers)
        if self._followers:
            self._sender.call(number, method, args)
        self._worker.run_call(method, args).add_done_callback(lambda done: call.add(RankAnswer.of(self._rank, done)))
        return call

    def _take_answers(self) -> None:
        for found in self._sender.answers():
            if found.id == KV_REPORT:
                self._kv_reports.append((found.answer.rank, KVReport(*found.answer.value)))
            elif (call := self._calls.get(found.id)) is not None:
                call.add(found.answer)

    def take_kv_reports(self) -> list[tuple[int, KVReport]]:
        """Progress of the storage on the followers."""
        self._take_answers()
        reports, self._kv_reports = self._kv_reports, []
        return reports

    def close(self) -> None:
        """Stops the followers and the local worker after the steps sent so far."""
        self._sender.stop()
        self._worker.close()

    def _wait_for_followers(self) -> EngineDeadError | None:
        """Waits until the next plan may be sent; returns the error if a rank is lost. The detector finds hangs."""
        while (failure := self._detector.failure) is None:
            if self._sender.sequence - self._detector.slowest_steps_done() < MAX_AHEAD:
                return None
            time.sleep(0.001)
        return failure

    def _ended(self, local: Future[StepResult], future: Future[StepResult], began: float) -> None:
        self._progress.done(local)
        error = local.exception()
        if error is not None:  # the future fails with the detector's error
            failure = Failure.of(error)
            self._detector.failed(self._rank, failure.message, peer_lost=failure.peer_lost)
            return
        self._detector.stepped(time.monotonic() - began)
        with self._lock:
            if future in self._waiting:  # otherwise it has failed already
                self._waiting.remove(future)
                future.set_result(local.result())

    def _fail(self, error: EngineDeadError) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        self._worker.abandon()  # a step that waits for masks would never end
        for future in waiting:
            future.set_exception(error)
