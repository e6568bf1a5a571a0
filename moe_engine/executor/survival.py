"""Recovery of a rank after others were lost: new world, new process groups, experts re-placed."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from moe_engine.core.executor import Survivors
from moe_engine.executor.process_groups import RankWorld

if TYPE_CHECKING:
    from moe_engine.worker.eplb.expert_recovery import RankRecovery, Recovered
    from moe_engine.worker.worker import Worker


class RankSurvival:
    """Implements `executor.leader_worker.Regroups`."""

    def __init__(self, world: RankWorld, worker: Worker, recovery: RankRecovery) -> None:
        self._world, self._worker, self._recovery = world, worker, recovery

    @classmethod
    def of(cls, world: RankWorld, worker: Any) -> RankSurvival | None:
        """None if the worker does not support losing ranks."""
        recovery = getattr(worker, "recovery", None)
        return None if recovery is None else cls(world, worker, recovery)

    def give_up(self) -> None:
        self._recovery.give_up()

    def go_on(self, survivors: Survivors) -> Future[Recovered]:
        return self._worker.call(self._go_on, survivors)

    def _go_on(self, survivors: Survivors) -> Recovered:
        from moe_engine.parallel.collectives import PeerLost

        self._world.rejoin(survivors, self._recovery.elastic.given_up)
        try:
            return self._recovery.go_on(survivors.alive)
        except RuntimeError as error:  # raised by torch while creating groups
            raise PeerLost(f"regrouping failed: {str(error).strip().partition(chr(10))[0]}") from error
