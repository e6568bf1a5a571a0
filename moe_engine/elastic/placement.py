"""Placement after the loss of ranks, and the experts lost with them.

Legend: L layers, E experts, G ranks, P slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from moe_engine.errors import ConfigError
from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.placement.placement import EMPTY, ExpertPlacement
from moe_engine.parallel.placement.policies import plan_placement, summed_counts


@dataclass(frozen=True)
class SurvivorPlan:
    """A placement with empty slots on lost ranks.

    Args:
        placement: of the full size; slots of lost ranks are `EMPTY`.
        lost: (layer, expert) with all copies on lost ranks; those that are placed must be read from the
            checkpoint.
        unplaced: (layer, expert) without a slot on the remaining ranks, those with the fewest tokens; the router must
            not choose them.
    """

    placement: ExpertPlacement
    lost: tuple[tuple[int, int], ...] = ()
    unplaced: tuple[tuple[int, int], ...] = ()


def plan_for_survivors(
    counts: ArrayLike,
    layout: ExpertLayout,
    alive: ArrayLike,
    previous: ExpertPlacement,
    policy: str = "auto",
    min_gain: float = 0.0,
) -> SurvivorPlan:
    """Plans for the live ranks, with few moves.

    Args:
        counts: tokens of each logical expert, [L, E] or [S, L, E].
        layout: of the whole group, lost ranks included.
        alive: bool [G].
        previous: the placement before the loss.
        policy: see `plan_placement`; nodes with unequal numbers of live ranks are treated as one.
        min_gain: see `plan_placement`.

    Raises:
        ConfigError: no live rank, or the sizes do not agree.
    """
    alive = np.asarray(alive, dtype=bool)
    tokens = summed_counts(counts, layout.num_experts)
    if alive.shape != (layout.num_ranks,) or not alive.any():
        raise ConfigError(f"live ranks {alive.tolist()}: at least one of {layout.num_ranks} is needed")
    survivors = previous.of_ranks(alive)
    num_slots = survivors.num_physical
    if num_slots < layout.num_experts:
        table = _hottest(tokens, survivors)
    else:
        table = plan_placement(
            tokens, _layout_of(layout, alive, num_slots), _policy(policy, layout, alive), survivors, min_gain
        ).physical_to_logical
    full = np.full_like(previous.by_rank, EMPTY)
    full[:, alive] = table.reshape(previous.num_layers, int(alive.sum()), -1)
    placement = ExpertPlacement(full.reshape(previous.num_layers, -1), layout.num_experts, layout.num_ranks)
    return SurvivorPlan(placement, tuple(survivors.missing), tuple(placement.missing))


def _nodes_left(layout: ExpertLayout, alive: np.ndarray) -> int:
    """Nodes with live ranks, if all have the same number; else 1."""
    left = alive.reshape(layout.num_nodes, -1).sum(axis=1)
    left = left[left > 0]
    return len(left) if (left == left[0]).all() else 1


def _policy(policy: str, layout: ExpertLayout, alive: np.ndarray) -> str:
    """`policy`, or auto if groups no longer fit the remaining nodes."""
    fits = layout.num_groups % _nodes_left(layout, alive) == 0
    return policy if fits or policy != "deepseek_hierarchical" else "auto"


def _layout_of(layout: ExpertLayout, alive: np.ndarray, num_slots: int) -> ExpertLayout:
    return replace(
        layout,
        num_ranks=int(alive.sum()),
        num_redundant=num_slots - layout.num_experts,
        num_nodes=_nodes_left(layout, alive),
    )


def _hottest(tokens: np.ndarray, survivors: ExpertPlacement) -> np.ndarray:
    """[L, slots]: the experts with most tokens, one slot each; kept experts stay in place."""
    num_slots = survivors.num_physical
    table = survivors.physical_to_logical.copy()
    for layer, row in enumerate(table):
        wanted = set(np.argsort(-tokens[layer], kind="stable")[:num_slots].tolist())
        for slot, expert in enumerate(row.tolist()):
            if expert in wanted:
                wanted.remove(expert)
            else:
                row[slot] = EMPTY
        hottest_first = sorted(wanted, key=lambda expert: -tokens[layer, expert])
        row[row == EMPTY] = hottest_first
    return table
