"""Renames interchangeable ranks of a plan, so that as many experts as possible stay on their ranks.

Ranks of one node are interchangeable in a plan, and so are whole nodes and the slots of a rank. Only ranks are renamed
here; `moves` assigns slots, since it tracks the current contents.

Legend: L layers, G ranks, P slots, E experts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.placement.placement import ExpertPlacement


def maximize_overlap(plan: ExpertPlacement, previous: ExpertPlacement, layout: ExpertLayout) -> ExpertPlacement:
    """`plan` with its nodes, and its ranks inside each node, renamed to overlap with `previous`.

    Greedy matching, the pair with most common experts first: keeps at least half of the optimum.
    """
    per_node = layout.ranks_per_node
    renamed = np.empty_like(plan.by_rank)
    for layer in range(plan.num_layers):
        common = _experts_in_common(previous.by_rank[layer], plan.by_rank[layer], plan.num_experts)  # [G old, G new]
        tiles = common.reshape(layout.num_nodes, per_node, layout.num_nodes, per_node)
        inner = {
            (old, new): _match(tiles[old, :, new]) for old in range(layout.num_nodes) for new in range(layout.num_nodes)
        }
        kept = np.array(
            [
                [tiles[old, range(per_node), new, inner[old, new]].sum() for new in range(layout.num_nodes)]
                for old in range(layout.num_nodes)
            ]
        )
        for old, new in enumerate(_match(kept)):
            ranks = new * per_node + np.array(inner[old, new])
            renamed[layer, old * per_node : (old + 1) * per_node] = plan.by_rank[layer, ranks]
    return ExpertPlacement(renamed.reshape(plan.num_layers, -1), plan.num_experts, plan.num_ranks)


def _experts_in_common(old: NDArray[np.int32], new: NDArray[np.int32], num_experts: int) -> NDArray[np.int64]:
    """[G, slots] twice -> [G old, G new] experts that both hold."""
    held = np.zeros((2, len(old), num_experts + 1), dtype=np.float32)
    for side, ranks in enumerate((old, new)):
        held[side, np.arange(len(ranks))[:, None], ranks] = 1
    return (held[0, :, :-1] @ held[1, :, :-1].T).astype(np.int64)


def _match(value: NDArray[np.int64]) -> list[int]:
    """Square [B, B] -> the column of each row; largest values first, ties in favor of the unchanged index."""
    value = 2 * value + np.eye(len(value), dtype=value.dtype)
    columns = [0] * len(value)
    for _ in range(len(value)):
        row, column = divmod(int(value.argmax()), len(value))
        columns[row] = column
        value[row, :] = value[:, column] = -1
    return columns
