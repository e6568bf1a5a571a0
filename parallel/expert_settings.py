"""Expert settings from the flags: recording, placement, EPLB rebalancing. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.topology import Topology


@dataclass(frozen=True)
class RebalanceSettings:
    """``--enable-eplb``.

    Args:
        interval: forward passes between two rebalances (``--eplb-rebalance-num-iterations``).
        layers_at_once: layers with an expert in transfer to each rank at the same time.
        enough: balancedness (0 to 1) above which no expert is moved.
        adaptive: whether the interval follows what rebalances gain (``--autopilot``).
    """

    interval: int = 1000
    layers_at_once: int = 1
    enough: float = 1.0
    adaptive: bool = False


@dataclass(frozen=True)
class ExpertSettings:
    """Resolved settings, without ``auto``. The default enables nothing.

    Args:
        num_redundant: slots beyond one per expert, over all ranks.
        location: ``--init-expert-location``, input of `placement.sources.from_any`.
        policy: rebalancing algorithm (``--eplb-algorithm``).
        dispatch: replica choice per token, ``static`` or ``dynamic`` (``--ep-dispatch-algorithm``).
        recorder_mode: None: recording is disabled.
        buffer_size: passes kept in the modes stat and stat_approx; -1 for all.
        directory: directory of dumps.
        report_log, report_metrics: report balancedness of each pass to the log, to the metrics.
        rebalance: None: experts are not moved.
        returned: the experts of every token are kept, for requests that return them.
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
    returned: bool = False

    @property
    def reports(self) -> bool:
        return self.report_log or self.report_metrics

    @property
    def places_experts(self) -> bool:
        """True if slots differ from the experts in order."""
        return self.num_redundant > 0 or self.location != "trivial" or self.rebalance is not None

    def layout(self, num_experts: int, num_groups: int, topology: Topology) -> ExpertLayout:
        """The sizes of a model's placement. Raises ConfigError if they do not divide evenly."""
        ranks, nodes = topology.ep_size, topology.num_nodes
        return ExpertLayout(num_experts, ranks, self.num_redundant, nodes if ranks % nodes == 0 else 1, num_groups)
