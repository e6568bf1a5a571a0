"""Expert choices of MTP layers, counted only for the rebalancer: dumps cover the main model's passes.

Legend: M MTP layers, E logical experts, P slots, T tokens, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor


class DraftCounts:
    """Implements `models.layers.feed_forward.moe.ExpertIdsRecorder`. Drafts run any number of times between two passes,
    so choices are counted immediately.

    Args:
        first_layer: index of the first MTP layer.
        table: int [M, P], the expert in each slot; -1 is an empty one.
        num_experts: E.
        counts_here: True if this rank's choices count. If all ranks route the same tokens, only one rank counts.
    """

    def __init__(self, first_layer: int, table: Tensor, num_experts: int, *, counts_here: bool = True) -> None:
        self.counting = counts_here
        self._first = first_layer
        self._unused = num_experts  # an extra last column for empty slots and, through slot -1, for padding rows
        empty = table.new_full((len(table), 1), -1)
        self._target = self._experts_of(torch.cat([table, empty], dim=1).long())  # [M, P+1]
        self._sums = torch.zeros(len(table), num_experts + 1, dtype=torch.int64, device=table.device)

    def _experts_of(self, table: Tensor) -> Tensor:
        return torch.where(table < 0, self._unused, table)

    def ids_buffer(self, num_tokens: int) -> Tensor:
        """Not called: layers with movable experts never run in one call."""
        raise NotImplementedError

    def on_select(self, layer_index: int, topk_ids: Tensor) -> None:
        """topk_ids int [T, K] slots."""
        layer = layer_index - self._first
        experts = self._target[layer].take(topk_ids.flatten().long())
        self._sums[layer].scatter_add_(0, experts, torch.ones_like(experts))

    def take_window(self) -> Tensor:
        """int64 [M, E]: counts of this rank since the last call."""
        window = self._sums[:, :-1].clone()
        self._sums.zero_()
        return window

    def update_layer(self, layer_index: int, physical_to_logical: Tensor) -> None:
        """Between passes: sets the experts of a layer's slots, int [P]."""
        table = physical_to_logical.to(self._target.device, torch.int64)
        self._target[layer_index - self._first, :-1] = self._experts_of(table)
