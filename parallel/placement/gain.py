"""The gain of EPLB on recorded counts.

Legend: S passes, L layers, E experts, G ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_engine.errors import ConfigError
from moe_engine.parallel.placement.balance import layer_balancedness, rank_loads
from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.placement.placement import ExpertPlacement
from moe_engine.parallel.placement.policies import plan_placement

MAX_JUDGED_PASSES = 128
"""Max passes that placements are evaluated on, spread evenly over the recording; bounds the run time."""


@dataclass(frozen=True)
class Gain:
    """Gain of EPLB. Balancedness is mean / max tokens of the ranks, averaged over passes and layers.

    Args:
        trivial: balancedness of the trivial placement (slot i holds expert i mod E).
        planned: balancedness of a placement planned and evaluated on all passes.
        unseen: balancedness of a placement planned on the first half of the passes, evaluated on the second; None with
            one pass.
        slowest: tokens of the slowest rank with the placement of `planned`, summed over passes and layers, relative to
            the trivial placement: the ratio of expert times, if time is proportional to tokens.
        placement: the placement planned on all passes.
    """

    layout: ExpertLayout
    trivial: float
    planned: float
    unseen: float | None
    slowest: float
    placement: ExpertPlacement


def eplb_gain(passes: NDArray[np.int64], layout: ExpertLayout) -> Gain:
    """Evaluates EPLB on recorded passes [S, L, E]. Raises ConfigError if the layout does not fit."""
    moe_layers = np.flatnonzero(passes.any(axis=(0, 2)))
    placement = plan_placement(passes, layout)
    used = passes[:, moe_layers]
    half, at = len(used) // 2, np.unique(np.linspace(0, len(used) - 1, MAX_JUDGED_PASSES).astype(int))
    judged = used[at]
    trivial = rank_loads(ExpertPlacement.trivial(layout, len(moe_layers)), judged)
    planned = rank_loads(plan_placement(used, layout), judged)
    unseen = None
    if half:
        unseen = _mean(rank_loads(plan_placement(used[:half], layout), used[at[at >= half]]))
    slowest = float(planned.max(axis=-1).sum() / trivial.max(axis=-1).sum())
    return Gain(layout, _mean(trivial), _mean(planned), unseen, slowest, placement)


def _mean(loads: NDArray[np.float64]) -> float:
    """Mean balancedness of `loads` [S, L, G] over the layers and passes with at least one token."""
    busy = loads.any(axis=-1)
    return float(layer_balancedness(loads)[busy].mean()) if busy.any() else 1.0


def usual_layouts(
    num_experts: int, num_nodes: int = 1, num_groups: int = 1, sizes: Sequence[int] | None = None
) -> Iterator[ExpertLayout]:
    """For each EP size (default: powers of two) the minimum redundancy that divides, and one more slot per rank."""
    usual = [size for size in (2, 4, 8, 16, 32, 64, 128) if size <= num_experts and size % num_nodes == 0]
    for num_ranks in sizes or usual:
        if num_ranks < 1:
            raise ConfigError(f"--ep-size {num_ranks}: at least 1")
        for redundant in dict.fromkeys((-num_experts % num_ranks, -num_experts % num_ranks + num_ranks)):
            yield ExpertLayout(num_experts, num_ranks, redundant, num_nodes, num_groups)
