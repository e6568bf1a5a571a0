"""What MTP layers choose, counted for the rebalancer alone: dumps are of the model's own passes.

Legend: M MTP layers, E logical experts, P slots, T tokens, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor


class DraftCounts:
    """Implements `models.layers.moe.ChoiceCounter`. Drafts run any number of times between two passes, so that choices
    are counted as they come.

    Args:
        first_layer: the number of the first MTP layer.
        table: int [M, P], the expert in each slot; -1 is an empty one.
        num_experts: E.
        counts_here: whether this rank's choices count. Where all ranks route the same tokens only one rank's do.
    """

    def __init__(self, first_layer: int, table: Tensor, num_experts: int, *, counts_here: bool = True) -> None:
        self.counting = counts_here
        self._first = first_layer
        self._unused = num_experts  # a last column for empty slots, and, by way of slot -1, for rows without a token
        empty = table.new_full((len(table), 1), -1)
        self._target = self._experts_of(torch.cat([table, empty], dim=1).long())  # [M, P+1]
        self._sums = torch.zeros(len(table), num_experts + 1, dtype=torch.int64, device=table.device)

    def _experts_of(self, table: Tensor) -> Tensor:
        return torch.where(table < 0, self._unused, table)

    def room_for(self, num_tokens: int) -> Tensor:
        """Not asked for: layers whose experts move are never run in one call."""
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
        """Between passes: a layer's slots hold other experts from now on, int [P]."""
        table = physical_to_logical.to(self._target.device, torch.int64)
        self._target[layer_index - self._first, :-1] = self._experts_of(table)
