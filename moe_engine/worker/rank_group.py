"""The worker of a core that has followers: every plan goes to them first, then runs here; results come from here alone.

All ranks run the same plans in the same order, each on its own shards, and meet in the collectives inside. A step that
fails on one rank leaves the others in the middle of a collective, so a failure ends the whole group, with the name of the
rank at fault.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Protocol

from moe_engine.errors import EngineDeadError
from moe_engine.parallel.collectives import PeerLost
from moe_engine.types import StepPlan, StepResult
from moe_engine.worker.plan_channel import PlanSender
from moe_engine.worker.rank_progress import Progress

MAX_AHEAD = 64
"""Steps that the leader may be ahead of its slowest follower; collectives usually keep them within one."""


class RankLost(EngineDeadError):
    """A rank of the group died, hangs or failed; names it and where it was. The group cannot go on."""


class LocalWorker(Protocol):
    """The part of `worker.Worker` a rank uses."""

    def execute(self, plan: StepPlan) -> Future[StepResult]: ...

    def close(self) -> None: ...


class Watch(Protocol):
    """Who knows how the other ranks are."""

    verdict: RankLost | None

    def slowest_steps_done(self) -> int:
        """Steps that every follower has done."""

    def failed(self, rank: int, message: str, *, peer_lost: bool) -> None:
        """A rank's step raised; with `peer_lost` only because another rank went, whom the watch will find."""

    def stepped(self, seconds: float) -> None:
        """How long a step took, for what counts as late."""

    def on_verdict(self, listener: object) -> None: ...


class RankGroupWorker:
    """Implements `core.StepWorker` for rank 0. `execute` and `check` belong to one thread.

    A future fails with `RankLost` the moment the watch has found who is lost, though the local step may hang in a
    collective for much longer.
    """

    def __init__(self, worker: LocalWorker, sender: PlanSender, watch: Watch, progress: Progress) -> None:
        self._worker = worker
        self._sender = sender
        self._watch = watch
        self._progress = progress
        self._lock = threading.Lock()
        self._waiting: list[Future[StepResult]] = []
        watch.on_verdict(self._lost)

    def check(self) -> None:
        """Raises `RankLost` if a rank is lost; for a core that has nothing to run."""
        if self._watch.verdict is not None:
            raise self._watch.verdict

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """The result of a step on rank 0, or the `RankLost` that ended the group."""
        future: Future[StepResult] = Future()
        with self._lock:
            self._waiting.append(future)
        if not self._wait_for_followers():
            self._lost(self._watch.verdict)
            return future
        self._sender.send(plan)
        self._progress.begin(plan)
        began = time.monotonic()
        local = self._worker.execute(plan)
        local.add_done_callback(lambda done: self._ended(done, future, began))
        return future

    def close(self) -> None:
        """Ends the followers and the local worker after the steps given so far."""
        self._sender.stop()
        self._worker.close()

    def _wait_for_followers(self) -> bool:
        """Until the next plan may be sent; False if a rank is lost. A follower that hangs is named by the watch."""
        while self._watch.verdict is None:
            if self._sender.sequence - self._watch.slowest_steps_done() < MAX_AHEAD:
                return True
            time.sleep(0.001)
        return False

    def _ended(self, local: Future[StepResult], future: Future[StepResult], began: float) -> None:
        self._progress.done(local)
        error = local.exception()
        if error is not None:  # the future fails with the verdict on this
            self._watch.failed(0, str(error), peer_lost=comes_from_a_lost_peer(error))
            return
        self._watch.stepped(time.monotonic() - began)
        with self._lock:
            if future in self._waiting:  # else it failed already
                self._waiting.remove(future)
                future.set_result(local.result())

    def _lost(self, verdict: RankLost | None) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.set_exception(verdict or RankLost("a rank is lost"))


def comes_from_a_lost_peer(error: BaseException | None) -> bool:
    """Whether an error is only the echo of another rank's end."""
    while error is not None:
        if isinstance(error, PeerLost):
            return True
        error = error.__cause__
    return False
