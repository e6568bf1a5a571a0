"""Draft trees as tensors.

Node 0 of a tree is the request's last token (the root), the others are drafts; a node comes after its parent. In a
chain node i hangs on node i - 1. Shape is known on the host, tokens are on the device.

Legend: D requests with drafts, N nodes of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_engine.parallel.step_sizes import StepSizes


@dataclass(frozen=True)
class DraftTask:
    """What a drafter is asked for: trees for some rows, of at most `num_nodes` nodes and exactly `depth` levels.

    Request i has computed lengths[i] tokens; its last token stands at that position and is the root. With DP attention
    `sizes` are those of each forward that drafts in any group: all ranks run so many.
    """

    rows: np.ndarray  # [D] int64
    lengths: np.ndarray  # [D] int64
    rows_device: Tensor  # [D] int64
    roots: Tensor  # [D] int64
    depth: int
    topk: int
    num_nodes: int
    sizes: Sequence[StepSizes] = ()


@dataclass(frozen=True)
class Drafts:
    """tokens [D, N], the root first; a draft of -1 is none (it is never accepted). `parents` [D, N] None: chains."""

    tokens: Tensor  # [D, N] int64
    parents: Tensor | None = None  # [D, N] int64; of the root: -1

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    def levels(self) -> Tensor | None:
        """Depth of each node [D, N] int64, 0 for the root; None for chains."""
        if self.parents is None:
            return None
        levels = torch.zeros_like(self.parents)
        for node in range(1, self.num_nodes):
            levels[:, node] = levels.gather(1, self.parents[:, node : node + 1])[:, 0] + 1
        return levels

    def visible(self) -> Tensor | None:
        """Masks [D, N] int64 as `PagedQueries.visible`: a node sees its ancestors and itself. None for chains."""
        if self.parents is None:
            return None
        return ancestor_masks(self.parents)


def ancestor_masks(parents: Tensor) -> Tensor:
    """parents [D, N], -1 for a root -> bit b of masks[d, n] says that b is n or above n."""
    masks = torch.zeros_like(parents)
    for node in range(parents.shape[1]):
        parent = parents[:, node : node + 1]
        above = masks.gather(1, parent.clamp_min(0))[:, 0]
        masks[:, node] = torch.where(parent[:, 0] < 0, 0, above) | (1 << node)
    return masks
