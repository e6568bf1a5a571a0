"""The gain of EPLB on the recorded counts, for the live page. numpy is imported by the first call.

Legend: L layers, E experts, G ranks.
"""

from __future__ import annotations

from typing import Any

MAX_RANKS = 64


def gain_view(counts: list[list[int]], num_ranks: int, num_nodes: int, num_redundant: int) -> dict[str, Any]:
    """For counts [L][E] with at least one token.

    Args:
        num_ranks, num_nodes, num_redundant: of the launch; its ranks are compared if there are several.

    Returns:
        ``ranks``: tokens of each rank with the experts in order, ``planned``: with EPLB's placement; both empty for one
        rank. ``rows``: for expert-parallel sizes the balancedness of both placements, and the busiest rank's tokens
        relative to the experts in order.
    """
    import numpy as np

    from moe_engine.parallel.placement.balance import rank_loads
    from moe_engine.parallel.placement.gain import eplb_gain, usual_layouts
    from moe_engine.parallel.placement.layout import ExpertLayout
    from moe_engine.parallel.placement.placement import ExpertPlacement

    total = np.asarray(counts, dtype=np.int64)
    busy = total[total.any(axis=1)]
    num_experts = total.shape[1]
    found: dict[str, Any] = {"ranks": [], "planned": [], "rows": []}
    layouts = [one for one in usual_layouts(num_experts) if one.num_ranks <= MAX_RANKS]
    if num_ranks > 1:
        own = ExpertLayout(num_experts, num_ranks, num_redundant, num_nodes)
        layouts = [own, *(one for one in layouts if one != own)]
        planned = eplb_gain(busy[None], own).placement
        in_order = ExpertPlacement.trivial(own, len(busy))
        found["ranks"] = [round(tokens) for tokens in rank_loads(in_order, busy).sum(axis=0).tolist()]
        found["planned"] = [round(tokens) for tokens in rank_loads(planned, busy).sum(axis=0).tolist()]
    for layout in layouts:
        gain = eplb_gain(busy[None], layout)
        found["rows"].append(
            {
                "ep_size": layout.num_ranks,
                "redundant_experts": layout.num_redundant,
                "trivial": round(gain.trivial, 4),
                "eplb": round(gain.planned, 4),
                "slowest_rank": round(gain.slowest, 4),
                "is_launch": num_ranks > 1 and layout == layouts[0],
            }
        )
    return found
