"""A scheduling rank that continues without lost ranks."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from moe_engine.cluster.dp_rank import SchedulingRank
from moe_engine.cluster.heartbeat_client import HeartbeatClient
from moe_engine.cluster.rank_process import RankSpec
from moe_engine.core.loop import EngineCore
from moe_engine.core.setup import engine_info
from moe_engine.core.transport import ZmqTransport
from moe_engine.elastic.leader_worker import Membership, SurvivingRank, SurvivingWorker
from moe_engine.elastic.messages import Ready, Regroup, StepFailed, decode_to_rank
from moe_engine.elastic.rendezvous import SurvivorWorld
from moe_engine.elastic.steps import SurvivorExchange, SurvivorSync
from moe_engine.elastic.survivors import RanksChanged
from moe_engine.executor import messages
from moe_engine.executor.make_worker import worker_options

if TYPE_CHECKING:
    from moe_engine.core.shared_status import SharedStatus
    from moe_engine.executor.leader_worker import LeaderWorker
    from moe_engine.worker.worker import Worker

logger = logging.getLogger("moe_engine")


class RankHeartbeat(HeartbeatClient):
    """Forwards announcements of survivors."""

    decode = staticmethod(decode_to_rank)

    def __init__(self, members: Membership, *args: Any, **named: Any) -> None:
        self._members = members
        super().__init__(*args, **named)

    def _take(self, message: Any) -> None:
        if isinstance(message, Regroup):
            self._members.announce(message.survivors)
        else:
            super()._take(message)


class ElasticRank(SchedulingRank):
    """An attention group of one rank, whose parent is a `RankSupervisor`."""

    world_class = SurvivorWorld
    exchange_class = SurvivorExchange

    def __init__(self, spec: RankSpec) -> None:
        self._members = Membership(spec.place.size, self._report_failure)
        super().__init__(spec)

    def _report_failure(self, message: str, peer_lost: bool, generation: int) -> None:
        self._heartbeat.send(StepFailed(self._place.rank, message, peer_lost, generation=generation))

    def _make_heartbeat(self, *args: Any) -> HeartbeatClient:
        return RankHeartbeat(self._members, *args)

    def _prepare(self, welcome: messages.Welcome) -> Worker:
        from moe_engine.elastic.recovery import RankRecovery

        own = super()._prepare(welcome)
        assert isinstance(self._world, SurvivorWorld) and own.weights is not None
        own.weights.refusal = "--elastic-ep: weights cannot be updated; a recovery would read the old checkpoint"
        recovery = RankRecovery(own, worker_options(self._spec.config, self._place.device))
        self._regroups = SurvivingRank(self._world, own, recovery)
        return own

    def _report_loaded(self, loaded: messages.Loaded, own: Worker) -> None:
        self._heartbeat.send(Ready(self._place.rank, engine_info(self._spec.config, own)))
        super()._report_loaded(loaded, own)

    def _make_worker(self, own: Worker) -> LeaderWorker:
        rank = self._place.rank
        assert isinstance(self._heartbeat, RankHeartbeat)
        return SurvivingWorker(own, self._sender, self._members, self._progress, rank, self._regroups)

    def _serve(self, worker: LeaderWorker, own: Worker, port: ZmqTransport) -> None:
        assert isinstance(worker, SurvivingWorker) and isinstance(self._exchange, SurvivorExchange)
        dp_sync = SurvivorSync(self._exchange, worker.check)
        core = self._make_core(worker, own, port, dp_sync)
        serve_across_losses(core, worker, dp_sync, self._status, self._place.group)


def serve_across_losses(
    core: EngineCore, worker: SurvivingWorker, dp_sync: SurvivorSync, status: SharedStatus, group: int
) -> None:
    """Runs the core until its orderly shutdown. After a loss of ranks, running requests return to the queue and resume
    once the survivors have regrouped."""
    known = 0  # losses logged
    while True:
        try:
            return core.run()
        except RanksChanged:
            since = time.monotonic() - status.read().silence
        core.start_over()
        survivors, recovered = worker.regroup(lambda: status.write(last_turn=time.monotonic()))
        dp_sync.regroup(survivors.generation, survivors.alive)
        losses, known = survivors.losses[known:], len(survivors.losses)
        if group == survivors.first:
            logger.warning(
                "%s. Serving paused for %.2f s and continues with %d of %d ranks: %d experts copied, %d read from the "
                "checkpoint, balancedness of the placement %.3f",
                "; ".join(losses),
                time.monotonic() - since,
                sum(survivors.alive),
                len(survivors.alive),
                recovered.copied,
                recovered.read,
                recovered.balancedness,
            )
