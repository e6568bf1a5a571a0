"""Executor of a rank group, leader side: broadcasts every plan to the followers, runs it locally, returns the local
result.

All ranks run the same plans in the same order, each on its own shards, and synchronize in the collectives. A step that
fails on one rank leaves the others blocked in a collective, so a failure stops the whole group; the error names the
rank at fault.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from moe_engine.core.executor import RankLost, RanksChanged, Survivors
from moe_engine.errors import ConfigError, MoeEngineError, StepNotRun
from moe_engine.executor.progress import Progress
from moe_engine.types import StepPlan, StepResult

MAX_AHEAD = 64
"""Max steps between the leader and its slowest follower; collectives usually keep it at one."""
REGROUP_POLL_SECONDS = 0.005


class Regroups(Protocol):
    """A rank that can continue after other ranks were lost."""

    def give_up(self) -> None:
        """Makes pending collectives with lost ranks fail soon. Thread-safe."""

    def go_on(self, survivors: Survivors) -> Future[Any]:
        """Collective over the survivors: when done, they can run steps. Queued behind the abandoned work."""


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


def kernels_of(worker: Any) -> dict[str, str]:
    """Backend chosen by a `worker.Worker`, by kernel family."""
    return {choice.family: choice.row.name for choice in worker.info.choices}


class LocalWorker(Protocol):
    """The part of `worker.Worker` that a rank uses."""

    def call_all(self, method: str) -> Future[list[Any]]: ...

    def execute(self, plan: StepPlan) -> Future[StepResult]: ...

    def close(self) -> None: ...


def call_one(worker: LocalWorker, method: str) -> Future[Any]:
    """Runs one of `Worker.calls` on this rank only."""
    answer: Future[Any] = Future()

    def arrived(done: Future[list[Any]]) -> None:
        error = done.exception()
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(done.result()[0])

    worker.call_all(method).add_done_callback(arrived)
    return answer


class PlanSender(Protocol):
    """Broadcasts plans to the followers."""

    sequence: int
    """Sequence number of the last plan sent."""

    def send(self, plan: StepPlan) -> int: ...

    def stop(self) -> None: ...


class Detector(Protocol):
    """The failure detector as `LeaderWorker` uses it. `failure`: the error that stops the group, or None."""

    failure: RankLost | None
    survivors: Survivors

    def slowest_steps_done(self) -> int:
        """Steps that every follower has finished."""

    def failed(self, rank: int, message: str, *, peer_lost: bool, generation: int = 0) -> None:
        """Reports that a rank's step raised; `peer_lost`: because of another rank, which the detector identifies.
        Reports of an earlier generation are ignored."""

    def stepped(self, seconds: float) -> None:
        """Reports a step's duration, from which the limit for late ranks is derived."""

    def on_failure(self, listener: Callable[[RankLost], None]) -> None: ...

    def on_survivors(self, listener: Callable[[Survivors], None]) -> None:
        """Calls `listener` whenever ranks were lost and the others continue."""


class LeaderWorker:
    """`StepWorker` of `core.executor` for a rank that schedules. Call `execute`, `check` and `regroup` from one thread.

    A future fails with `RankLost` as soon as the detector has identified the lost rank, even if the local step hangs in
    a collective for longer; with `RanksChanged` if the others continue: then call `regroup`.

    Args:
        call_others: runs a call on all other ranks; None if rank 0 does it, or if there are none.
        rank: this rank's number.
        regroups: joins this rank with the survivors; None if the engine does not survive lost ranks.
    """

    def __init__(
        self,
        worker: LocalWorker,
        sender: PlanSender,
        detector: Detector,
        progress: Progress,
        call_others: Callable[[str], Future[list[Any]]] | None = None,
        *,
        rank: int = 0,
        regroups: Regroups | None = None,
    ) -> None:
        self._rank, self._regroups = rank, regroups
        self._generation = 0
        self._first_sequence = 0  # sequence number before the first step of this generation
        self._local: set[Future[StepResult]] = set()  # steps running on this rank
        self._worker = worker
        self._call_others = call_others
        self._sender = sender
        self._detector = detector
        self._progress = progress
        self._lock = threading.Lock()
        self._waiting: list[Future[StepResult]] = []
        detector.on_failure(self._lost)
        detector.on_survivors(self._changed)

    def check(self) -> None:
        """Raises `RankLost` if a rank is lost, `RanksChanged` if the others continue. For a core without a step in
        flight."""
        if self._detector.failure is not None:
            raise self._detector.failure
        if self._detector.survivors.generation != self._generation:
            raise RanksChanged(self._detector.survivors.losses[-1])

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """Runs a step on all ranks; the future holds the local result, or the `RankLost` that stopped the group."""
        future: Future[StepResult] = Future()
        with self._lock:
            self._waiting.append(future)
        if self._detector.survivors.generation != self._generation:
            self._changed(self._detector.survivors)
            return future
        if (failure := self._wait_for_followers()) is not None:
            self._lost(failure)
            return future
        self._sender.send(plan)
        self._progress.begin(plan)
        began = time.monotonic()
        local = self._worker.execute(plan)
        self._local.add(local)
        generation = self._generation
        local.add_done_callback(lambda done: self._ended(done, future, began, generation))
        return future

    def regroup(self, on_wait: Callable[[], None]) -> tuple[Survivors, Any]:
        """Abandons the steps in flight and regroups the survivors; restarts if more ranks are lost meanwhile.

        Args:
            on_wait: called repeatedly while waiting.

        Returns:
            The survivors, and the result of `Regroups.go_on`.

        Raises:
            RankLost: the survivors cannot continue.
        """
        assert self._regroups is not None
        while True:
            survivors = self._detector.survivors
            self._regroups.give_up()
            for local in list(self._local):
                self._wait_for(local, survivors, on_wait)
            self._progress.restart()
            formed = self._regroups.go_on(survivors)
            self._generation = survivors.generation
            self._first_sequence = self._sender.sequence
            self._wait_for(formed, survivors, on_wait)
            error = formed.exception()
            if error is None and self._detector.survivors is survivors:
                return survivors, formed.result()
            if error is not None:
                failure = Failure.of(error)
                message = f"{failure.message}; while regrouping after a loss: {survivors.losses[-1]}"
                self._detector.failed(self._rank, message, peer_lost=failure.peer_lost, generation=survivors.generation)
            while error is not None and self._detector.survivors is survivors:  # wait for the detector's result
                self._poll(on_wait)

    def _wait_for(self, future: Future[Any], survivors: Survivors, on_wait: Callable[[], None]) -> None:
        """Waits for the future's result or error. If another rank is lost, the work is abandoned and fails soon."""
        assert self._regroups is not None
        while not future.done():
            self._poll(on_wait)
            if self._detector.survivors is not survivors:
                self._regroups.give_up()

    def _poll(self, on_wait: Callable[[], None]) -> None:
        if self._detector.failure is not None:
            raise self._detector.failure
        on_wait()
        time.sleep(REGROUP_POLL_SECONDS)

    def call_all(self, method: str) -> Future[list[Any]]:
        """Calls one of `Worker.calls` on every rank of the world; replies in rank order.

        Only the first surviving rank calls the others; on other ranks the result is empty, so that nothing is counted
        twice.
        """
        answers: Future[list[Any]] = Future()
        if self._call_others is None or self._detector.survivors.alive.index(True) != self._rank:
            answers.set_result([])
            return answers
        asked = [self._worker.call_all(method), self._call_others(method)]  # its rank precedes the others
        pending = [len(asked)]

        def arrived(done: Future[list[Any]]) -> None:
            with self._lock:
                pending[0] -= 1
                error, last = done.exception(), pending[0] == 0
            if error is not None and not answers.done():
                answers.set_exception(error)
            elif last and not answers.done():
                answers.set_result([answer for part in asked for answer in part.result()])

        for part in asked:
            part.add_done_callback(arrived)
        return answers

    def close(self) -> None:
        """Stops the followers and the local worker after the steps sent so far."""
        self._sender.stop()
        self._worker.close()

    def _wait_for_followers(self) -> RankLost | None:
        """Waits until the next plan may be sent; returns the error if a rank is lost. The detector finds hangs."""
        while (failure := self._detector.failure) is None:
            if self._sender.sequence - self._first_sequence - self._detector.slowest_steps_done() < MAX_AHEAD:
                return None
            time.sleep(0.001)
        return failure

    def _ended(self, local: Future[StepResult], future: Future[StepResult], began: float, generation: int) -> None:
        self._progress.done(local)
        self._local.discard(local)
        error = local.exception()
        if error is not None:  # the future fails with the detector's error
            failure = Failure.of(error)
            self._detector.failed(self._rank, failure.message, peer_lost=failure.peer_lost, generation=generation)
            return
        self._detector.stepped(time.monotonic() - began)
        with self._lock:
            if future in self._waiting:  # otherwise it has failed already
                self._waiting.remove(future)
                future.set_result(local.result())

    def _changed(self, survivors: Survivors) -> None:
        self._fail(RanksChanged(survivors.losses[-1]))

    def _lost(self, failure: RankLost) -> None:
        self._fail(failure)

    def _fail(self, error: MoeEngineError) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.set_exception(error)
