"""Draft trees as tensors.

Node 0 of a tree is the request's last token (the root), the others are drafts; a node comes after its parent. In a
chain the parent of node i is node i - 1. Shapes are known on the host, tokens are on the device.

Legend: D requests with drafts, N nodes of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.speculation.trees import ancestor_masks
from moe_engine.parallel.step_sizes import StepSizes


@dataclass(frozen=True)
class DraftTask:
    """Input of a drafter: trees for some rows, of at most `num_nodes` nodes and exactly `depth` levels.

    Request i has computed lengths[i] tokens; its last token is at that position and is the root. With DP attention
    `sizes` has the sizes of each draft forward over all groups: all ranks run as many forwards.
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
    """tokens [D, N], the root first; -1: no draft (never accepted). `parents` [D, N] None: chains."""

    tokens: Tensor  # [D, N] int64
    parents: Tensor | None = None  # [D, N] int64; -1 for the root

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
        """Masks [D, N] int64 as `PagedQueries.visible`: a node attends to its ancestors and itself. None for chains."""
        if self.parents is None:
            return None
        return ancestor_masks(self.parents)


def target_ids(ids: Tensor | None, drawn: Tensor) -> Tensor:
    """Tokens drawn from a draft vocabulary, by the target's ids; -1 (invalid logits) becomes a token.

    Args:
        ids: the target's ids [W] of the draft vocabulary; None: it is the target's.
    """
    drawn = drawn.clamp_min(0)
    return drawn if ids is None else ids[drawn]
