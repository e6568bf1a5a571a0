"""Balancedness: predicted loads of the ranks for a placement and given counts.

Legend: S passes, L layers, E experts, G ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_engine.parallel.placement.placement import EMPTY, ExpertPlacement

EPSILON = 1e-5
"""Keeps a layer without tokens (dense, or an idle pass) at 1; the same as in SGLang's metric."""


def rank_loads(placement: ExpertPlacement, counts: ArrayLike) -> NDArray[np.float64]:
    """counts [..., L, E] of tokens -> [..., L, G] tokens each rank computes, if copies share their expert's evenly."""
    share = np.asarray(counts, dtype=np.float64) / np.maximum(placement.num_valid, 1)
    slots = placement.physical_to_logical  # [L, P]
    by_slot = share[..., np.arange(placement.num_layers)[:, None], np.maximum(slots, 0)] * (slots != EMPTY)
    return by_slot.reshape(*share.shape[:-1], placement.num_ranks, -1).sum(axis=-1)


def layer_balancedness(loads: ArrayLike) -> NDArray[np.float64]:
    """loads [..., G] -> mean / max over the ranks, 1 if perfectly even."""
    loads = np.asarray(loads, dtype=np.float64)
    return (loads.mean(-1) + EPSILON) / (loads.max(-1) + EPSILON)


def balancedness(placement: ExpertPlacement, counts: ArrayLike) -> float:
    """The mean over passes and layers of mean / max tokens per rank; counts [L, E] or [S, L, E]."""
    return float(layer_balancedness(rank_loads(placement, counts)).mean())
