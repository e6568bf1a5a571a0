"""The worker of a core that has followers: every plan goes to them first, then runs here; results come from here alone.

All ranks run the same plans in the same order, each on its own shards, and meet in the collectives inside. A step that
fails on one rank leaves the others in the middle of a collective, so a failure ends the whole group, with the name of
the rank at fault.
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
"""Steps that the leader may be ahead of its slowest follower; collectives usually keep them within one."""
REGROUP_POLL_SECONDS = 0.005


class Regroups(Protocol):
    """A rank that can go on without others."""

    def give_up(self) -> None:
        """What is under way with the lost fails soon. From any thread."""

    def go_on(self, survivors: Survivors) -> Future[Any]:
        """Collective among them: ready for their steps when done. Queues behind what was given up."""


@dataclass(frozen=True)
class Failure:
    """Why a rank cannot go on. `peer_lost`: the fault is another rank's, or was reported before; `config_error`: the
    user's to mend."""

    message: str
    peer_lost: bool = False
    config_error: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        from moe_engine.parallel.collectives import PeerLost  # brings torch, which has been loaded where this can be

        message = str(error) if isinstance(error, MoeEngineError) else f"{type(error).__name__}: {error}"
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, PeerLost | StepNotRun):
            cause = cause.__cause__
        return cls(message, cause is not None, isinstance(error, ConfigError))


def kernels_of(worker: Any) -> dict[str, str]:
    """The kernels a `worker.Worker` chose, by family."""
    return {choice.family: choice.row.name for choice in worker.info.choices}


class LocalWorker(Protocol):
    """The part of `worker.Worker` a rank uses."""

    def call_all(self, method: str) -> Future[list[Any]]: ...

    def execute(self, plan: StepPlan) -> Future[StepResult]: ...

    def close(self) -> None: ...


def call_one(worker: LocalWorker, method: str) -> Future[Any]:
    """One of `Worker.calls` on this rank alone."""
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
    """Where plans leave for the followers."""

    sequence: int
    """Of the last plan sent."""

    def send(self, plan: StepPlan) -> int: ...

    def stop(self) -> None: ...


class Watch(Protocol):
    """Who knows how the other ranks are."""

    verdict: RankLost | None
    survivors: Survivors

    def slowest_steps_done(self) -> int:
        """Steps that every follower has done."""

    def failed(self, rank: int, message: str, *, peer_lost: bool, generation: int = 0) -> None:
        """A rank's step raised; with `peer_lost` only because another rank went, whom the watch will find. What a rank
        of an earlier generation says is no news."""

    def stepped(self, seconds: float) -> None:
        """How long a step took, for what counts as late."""

    def on_verdict(self, listener: Callable[[RankLost], None]) -> None: ...

    def on_survivors(self, listener: Callable[[Survivors], None]) -> None:
        """Calls `listener` when ranks were lost and the others go on."""


class LeaderWorker:
    """`StepWorker` of `core.executor` for the rank that schedules. `execute`, `check`, `regroup` belong to one thread.

    A future fails with `RankLost` the moment the watch has found who is lost, though the local step may hang in a
    collective for much longer; with `RanksChanged` where the others go on, who then `regroup`.

    Args:
        call_others: has all other ranks run a call; None where rank 0 does it, or there are none.
        rank: this one's number.
        regroups: takes this rank to the others that are left; None where no rank may be lost.
    """

    def __init__(
        self,
        worker: LocalWorker,
        sender: PlanSender,
        watch: Watch,
        progress: Progress,
        call_others: Callable[[str], Future[list[Any]]] | None = None,
        *,
        rank: int = 0,
        regroups: Regroups | None = None,
    ) -> None:
        self._rank, self._regroups = rank, regroups
        self._generation = 0
        self._first_sequence = 0  # of the steps of this generation
        self._local: set[Future[StepResult]] = set()  # that run here
        self._worker = worker
        self._call_others = call_others
        self._sender = sender
        self._watch = watch
        self._progress = progress
        self._lock = threading.Lock()
        self._waiting: list[Future[StepResult]] = []
        watch.on_verdict(self._lost)
        watch.on_survivors(self._changed)

    def check(self) -> None:
        """Raises `RankLost` if a rank is lost, `RanksChanged` if the others go on; for a core that has nothing to
        run."""
        if self._watch.verdict is not None:
            raise self._watch.verdict
        if self._watch.survivors.generation != self._generation:
            raise RanksChanged(self._watch.survivors.losses[-1])

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """The result of a step on rank 0, or the `RankLost` that ended the group."""
        future: Future[StepResult] = Future()
        with self._lock:
            self._waiting.append(future)
        if self._watch.survivors.generation != self._generation:
            self._changed(self._watch.survivors)
            return future
        if (verdict := self._wait_for_followers()) is not None:
            self._lost(verdict)
            return future
        self._sender.send(plan)
        self._progress.begin(plan)
        began = time.monotonic()
        local = self._worker.execute(plan)
        self._local.add(local)
        generation = self._generation
        local.add_done_callback(lambda done: self._ended(done, future, began, generation))
        return future

    def regroup(self, waiting: Callable[[], None]) -> tuple[Survivors, Any]:
        """Leaves what was under way and goes on with the ranks that are left, however many are lost meanwhile.

        Args:
            waiting: called from time to time.

        Returns:
            Who they are, and what `Regroups.go_on` brought.

        Raises:
            RankLost: the others cannot go on.
        """
        assert self._regroups is not None
        while True:
            survivors = self._watch.survivors
            self._regroups.give_up()
            for local in list(self._local):
                self._wait_for(local, survivors, waiting)
            self._progress.restart()
            formed = self._regroups.go_on(survivors)
            self._generation = survivors.generation
            self._first_sequence = self._sender.sequence
            self._wait_for(formed, survivors, waiting)
            error = formed.exception()
            if error is None and self._watch.survivors is survivors:
                return survivors, formed.result()
            if error is not None:
                failure = Failure.of(error)
                message = f"{failure.message}; this was to go on without a lost rank: {survivors.losses[-1]}"
                self._watch.failed(self._rank, message, peer_lost=failure.peer_lost, generation=survivors.generation)
            while error is not None and self._watch.survivors is survivors:  # the watch will say what is lost now
                self._rest(waiting)

    def _wait_for(self, future: Future[Any], survivors: Survivors, waiting: Callable[[], None]) -> None:
        """Until it has ended, well or badly. Where yet another rank is lost it is given up, and then ends soon."""
        assert self._regroups is not None
        while not future.done():
            self._rest(waiting)
            if self._watch.survivors is not survivors:
                self._regroups.give_up()

    def _rest(self, waiting: Callable[[], None]) -> None:
        if self._watch.verdict is not None:
            raise self._watch.verdict
        waiting()
        time.sleep(REGROUP_POLL_SECONDS)

    def call_all(self, method: str) -> Future[list[Any]]:
        """Calls one of `Worker.calls` on every rank of the world; answers in the order of the ranks.

        Only the first rank that is left asks the others: elsewhere the answer is empty, so that nothing counts twice.
        """
        answers: Future[list[Any]] = Future()
        if self._call_others is None or self._watch.survivors.alive.index(True) != self._rank:
            answers.set_result([])
            return answers
        asked = [self._worker.call_all(method), self._call_others(method)]  # it is before the others
        waiting = [len(asked)]

        def arrived(done: Future[list[Any]]) -> None:
            with self._lock:
                waiting[0] -= 1
                error, last = done.exception(), waiting[0] == 0
            if error is not None and not answers.done():
                answers.set_exception(error)
            elif last and not answers.done():
                answers.set_result([answer for part in asked for answer in part.result()])

        for part in asked:
            part.add_done_callback(arrived)
        return answers

    def close(self) -> None:
        """Ends the followers and the local worker after the steps given so far."""
        self._sender.stop()
        self._worker.close()

    def _wait_for_followers(self) -> RankLost | None:
        """Until the next plan may be sent, or a rank is lost. A follower that hangs is named by the watch."""
        while (verdict := self._watch.verdict) is None:
            if self._sender.sequence - self._first_sequence - self._watch.slowest_steps_done() < MAX_AHEAD:
                return None
            time.sleep(0.001)
        return verdict

    def _ended(self, local: Future[StepResult], future: Future[StepResult], began: float, generation: int) -> None:
        self._progress.done(local)
        self._local.discard(local)
        error = local.exception()
        if error is not None:  # the future fails with the verdict on this
            failure = Failure.of(error)
            self._watch.failed(self._rank, failure.message, peer_lost=failure.peer_lost, generation=generation)
            return
        self._watch.stepped(time.monotonic() - began)
        with self._lock:
            if future in self._waiting:  # else it failed already
                self._waiting.remove(future)
                future.set_result(local.result())

    def _changed(self, survivors: Survivors) -> None:
        self._fail(RanksChanged(survivors.losses[-1]))

    def _lost(self, verdict: RankLost) -> None:
        self._fail(verdict)

    def _fail(self, error: MoeEngineError) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.set_exception(error)
