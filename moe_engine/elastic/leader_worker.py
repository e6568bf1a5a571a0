"""Executor of a rank that continues without lost ranks: abandons steps in flight and regroups with the survivors."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from moe_engine.cluster.dp_rank import RemoteDetector
from moe_engine.elastic.rendezvous import SurvivorWorld
from moe_engine.elastic.survivors import RanksChanged, Survivors
from moe_engine.errors import EngineDeadError
from moe_engine.executor.leader_worker import Failure, LeaderWorker
from moe_engine.executor.plan_broadcast import PlanSender
from moe_engine.executor.progress import Progress

if TYPE_CHECKING:
    from moe_engine.elastic.recovery import RankRecovery, Recovered
    from moe_engine.worker.worker import Worker

POLL_SECONDS = 0.005


class Membership(RemoteDetector):
    """The ranks alive, as announced by the supervisor, and the generation that this rank has joined.

    Args:
        report: called with a failure of this rank's step, `peer_lost`, and the generation it ran in.
    """

    def __init__(self, num_ranks: int, report: Callable[[str, bool, int], None]) -> None:
        super().__init__(lambda message, peer_lost: report(message, peer_lost, self.generation))
        self.survivors = Survivors((True,) * num_ranks)
        self.generation = 0
        self.on_change: Callable[[RanksChanged], None] = lambda change: None

    def announce(self, survivors: Survivors) -> None:
        if survivors.generation <= self.survivors.generation or len(survivors.alive) != len(self.survivors.alive):
            return  # a duplicate announcement, or one of another world
        self.survivors = survivors
        self.on_change(RanksChanged(survivors.losses[-1]))

    @property
    def change(self) -> RanksChanged | None:
        """Set if this rank has not joined the announced survivors yet."""
        survivors = self.survivors
        return RanksChanged(survivors.losses[-1]) if survivors.generation != self.generation else None


class SurvivingRank:
    """A rank that continues after others were lost: new world, new process groups, experts re-placed."""

    def __init__(self, world: SurvivorWorld, worker: Worker, recovery: RankRecovery) -> None:
        self._world, self._worker, self._recovery = world, worker, recovery

    def give_up(self) -> None:
        """Makes pending collectives with lost ranks fail soon. Thread-safe."""
        self._recovery.give_up()

    def drain(self) -> Future[None]:
        """A future that is done when the submitted steps have ended."""
        return self._worker.call(lambda: None)

    def go_on(self, survivors: Survivors) -> Future[Recovered]:
        """Collective over the survivors: once it is done, they can run steps."""
        return self._worker.call(self._go_on, survivors)

    def _go_on(self, survivors: Survivors) -> Recovered:
        from moe_engine.parallel.collectives import PeerLost

        self._world.rejoin(survivors, self._recovery.elastic.given_up)
        try:
            return self._recovery.go_on(survivors.alive)
        except RuntimeError as error:  # raised by torch while creating groups
            raise PeerLost(f"regrouping failed: {str(error).strip().partition(chr(10))[0]}") from error


class SurvivingWorker(LeaderWorker):
    """A leader worker without followers. Its futures and `check` raise `RanksChanged` if ranks were lost and the others
    continue: then call `regroup`, from the same thread."""

    def __init__(
        self,
        worker: Worker,
        sender: PlanSender,
        members: Membership,
        progress: Progress,
        rank: int,
        regroups: SurvivingRank,
    ) -> None:
        super().__init__(worker, sender, members, progress, rank=rank)
        self._members, self._regroups = members, regroups
        members.on_change = self._fail

    def check(self) -> None:
        super().check()
        if (change := self._members.change) is not None:
            raise change

    def regroup(self, on_wait: Callable[[], None]) -> tuple[Survivors, Any]:
        """Abandons the steps in flight and regroups the survivors; restarts if more ranks are lost meanwhile.

        Args:
            on_wait: called repeatedly while waiting.

        Returns:
            The survivors, and the result of `SurvivingRank.go_on`.

        Raises:
            RankLost: the survivors cannot continue.
        """
        members = self._members
        while True:
            survivors = members.survivors
            self._regroups.give_up()
            self._wait_for(self._regroups.drain(), survivors, on_wait)
            self._progress.restart()
            formed = self._regroups.go_on(survivors)
            members.generation = survivors.generation
            self._wait_for(formed, survivors, on_wait)
            error = formed.exception()
            if error is None and members.survivors is survivors:
                return survivors, formed.result()
            if error is not None:
                failure = Failure.of(error)
                message = f"{failure.message}; while regrouping after a loss: {survivors.losses[-1]}"
                members.failed(self._rank, message, peer_lost=failure.peer_lost)
            while error is not None and members.survivors is survivors:  # wait for the supervisor's announcement
                self._poll(on_wait)

    def _wait_for(self, future: Future[Any], survivors: Survivors, on_wait: Callable[[], None]) -> None:
        """Waits for the future's result or error. If another rank is lost, the work is abandoned and fails soon."""
        while not future.done():
            self._poll(on_wait)
            if self._members.survivors is not survivors:
                self._regroups.give_up()

    def _poll(self, on_wait: Callable[[], None]) -> None:
        if self._members.failure is not None:
            raise self._members.failure
        on_wait()
        time.sleep(POLL_SECONDS)

    def _wait_for_followers(self) -> EngineDeadError | None:
        return self._members.change or super()._wait_for_followers()
