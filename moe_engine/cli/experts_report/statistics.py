"""Statistics of recorded counts: expert imbalance per layer.

Legend: L layers, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class LayerStatistics:
    """One MoE layer.

    Args:
        choices: tokens routed to experts, each counted once per expert.
        imbalance: choices of the busiest expert / mean.
        top10, top25: share of the choices of the busiest 10 % and 25 % of the experts, rounded up.
        num_idle: experts without a token.
        hottest: (expert, share of the choices), the busiest first.
    """

    layer: int
    choices: int
    imbalance: float
    top10: float
    top25: float
    num_idle: int
    hottest: tuple[tuple[int, float], ...]


def layer_statistics(total: NDArray[np.int64], num_hottest: int = 4) -> list[LayerStatistics]:
    """Statistics of every layer of `total` [L, E] with at least one token."""
    found = []
    for layer in np.flatnonzero(total.any(axis=1)).tolist():
        counts = total[layer]
        order = np.argsort(-counts, kind="stable")
        shares = counts[order] / counts.sum()
        found.append(
            LayerStatistics(
                layer=layer,
                choices=int(counts.sum()),
                imbalance=float(shares[0] * len(counts)),
                top10=float(shares[: math.ceil(len(counts) / 10)].sum()),
                top25=float(shares[: math.ceil(len(counts) / 4)].sum()),
                num_idle=int((counts == 0).sum()),
                hottest=tuple(zip(order[:num_hottest].tolist(), shares[:num_hottest].tolist())),
            )
        )
    return found
