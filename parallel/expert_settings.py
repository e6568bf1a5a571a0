"""What the operator chose for experts: recorded how, placed where, moved when. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.topology import Topology


@dataclass(frozen=True)
class RebalanceSettings:
    """``--enable-eplb``.

    Args:
        interval: passes between two plans (``--eplb-rebalance-num-iterations``).
        layers_at_once: layers that have an expert on the way to each rank at the same time.
        enough: balancedness (0 to 1) above which nothing is moved.
    """

    interval: int = 1000
    layers_at_once: int = 1
    enough: float = 1.0


@dataclass(frozen=True)
class ExpertSettings:
    """Resolved: nothing is ``auto`` any more. The default asks for nothing.

    Args:
        num_redundant: slots beyond one for each expert, over all ranks.
        location: ``--init-expert-location``, as `placement.sources.from_any` takes it.
        policy: of plans (``--eplb-algorithm``).
        dispatch: which copy a token goes to, ``static`` or ``dynamic`` (``--ep-dispatch-algorithm``).
        recorder_mode: None: nothing can be recorded.
        buffer_size: passes that the modes stat and stat_approx keep; -1 for all.
        directory: where dumps go.
        report_log, report_metrics: balancedness of each pass to the log, to the metrics.
        rebalance: None: experts stay where they are.
    """

    num_redundant: int = 0
    location: str = "trivial"
    policy: str = "auto"
    dispatch: str = "dynamic"
    recorder_mode: str | None = None
    buffer_size: int = 1000
    directory: Path = Path()
    report_log: bool = False
    report_metrics: bool = False
    rebalance: RebalanceSettings | None = None

    @property
    def reports(self) -> bool:
        return self.report_log or self.report_metrics

    @property
    def places_experts(self) -> bool:
        """Whether slots are anything else than the experts in their order."""
        return self.num_redundant > 0 or self.location != "trivial" or self.rebalance is not None

    def layout(self, num_experts: int, num_groups: int, topology: Topology) -> ExpertLayout:
        """The sizes of a model's placement. Raises ConfigError where they do not divide."""
        ranks, nodes = topology.ep_size, topology.num_nodes
        return ExpertLayout(num_experts, ranks, self.num_redundant, nodes if ranks % nodes == 0 else 1, num_groups)
