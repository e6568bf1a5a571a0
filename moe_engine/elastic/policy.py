"""The policy of ``--elastic-ep`` for lost ranks: the surviving ranks continue while their slots hold every expert."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moe_engine import logs
from moe_engine.cluster.core_spec import CoreSpec
from moe_engine.cluster.rank_process import RankSpec
from moe_engine.elastic.supervisor import RankSupervisor
from moe_engine.executor.options import RankGroupOptions, RankPlace
from moe_engine.executor.progress import Progress
from moe_engine.executor.sharded_worker import COLLECTIVE_SECONDS, sharded_worker
from moe_engine.planning.parallelism.resolve_elastic import Coverage
from moe_engine.planning.resolved_config import ResolvedConfig

if TYPE_CHECKING:
    from moe_engine.elastic.groups import ElasticContext
    from moe_engine.elastic.rank import ElasticRank
    from moe_engine.worker.worker import Worker


def surviving(options: RankGroupOptions, coverage: Coverage) -> RankGroupOptions:
    """The options of a replica that continues without lost ranks."""
    return replace(options, make_worker=elastic_worker, on_rank_lost=OthersContinue(coverage))


@dataclass(frozen=True)
class OthersContinue:
    """Implements `cluster.rank_loss.RankLossPolicy`: a supervisor above all ranks announces the survivors of a loss."""

    coverage: Coverage

    def make_parent(self, spec: CoreSpec, options: RankGroupOptions) -> RankSupervisor:
        level = spec.config.logging.log_level
        logs.setup_logging(level, "supervisor")
        return RankSupervisor(spec.config, options, spec, self.coverage, level)

    def make_scheduling_rank(self, spec: RankSpec) -> ElasticRank:
        from moe_engine.elastic.rank import ElasticRank

        return ElasticRank(spec)


def elastic_worker(config: ResolvedConfig, place: RankPlace, progress: Progress) -> Worker:
    """`RankGroupOptions.make_worker`: a sharded worker whose groups may lose ranks."""
    return sharded_worker(config, place, progress, join=_join)


def _join(config: ResolvedConfig, place: RankPlace, progress: Progress) -> ElasticContext:
    from moe_engine.elastic.groups import join

    return join(config.parallel.topology, place.rank, COLLECTIVE_SECONDS, place.device, progress.observe)
