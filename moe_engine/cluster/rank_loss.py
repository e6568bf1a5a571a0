"""The policy for lost ranks. It determines the processes of a replica.

By default the loss of a rank ends the replica. Another policy is injected as `RankGroupOptions.on_rank_lost` and
replaces the parent of the ranks and their schedulers.
"""

from __future__ import annotations

from typing import Any, Protocol

from moe_engine import logs
from moe_engine.cluster.core_spec import CoreSpec
from moe_engine.cluster.dp_rank import SchedulingRank
from moe_engine.cluster.multiproc_executor import MultiprocExecutor, Serving
from moe_engine.cluster.rank_process import RankSpec
from moe_engine.executor.options import RankGroupOptions


class RankParent(Protocol):
    """The parent of a replica's ranks, in the core process."""

    def serve(self) -> Serving:
        """Blocks until every rank is ready."""

    def close(self) -> None:
        """Stops the ranks."""


class RankLossPolicy(Protocol):
    """Picklable: it reaches every process of the replica in its options."""

    def make_parent(self, spec: CoreSpec, options: RankGroupOptions) -> RankParent:
        """In the core process."""

    def make_scheduling_rank(self, spec: RankSpec) -> SchedulingRank:
        """In the process of a further attention group."""


class LossEndsReplica:
    """Rank 0 is the parent of the ranks; it stops them all when one is lost."""

    def make_parent(self, spec: CoreSpec, options: RankGroupOptions) -> RankParent:
        level = spec.config.logging.log_level
        logs.setup_logging(level, options.places[0].name)
        return MultiprocExecutor(spec.config, options, spec, level)

    def make_scheduling_rank(self, spec: RankSpec) -> SchedulingRank:
        return SchedulingRank(spec)


def policy_of(options: RankGroupOptions) -> RankLossPolicy:
    policy: Any = options.on_rank_lost or LossEndsReplica()
    return policy
