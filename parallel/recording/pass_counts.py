"""What one pass counts: tokens of each physical expert in each layer, and each token's experts where asked for.

Legend: L layers, P physical experts, T tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_engine.parallel.recording.config import MAX_TOP_K, RecorderConfig


class PassCounts:
    """Filled layer by layer; the same tensors in every pass."""

    def __init__(self, config: RecorderConfig) -> None:
        self._device = config.device
        self._padded = config.padded
        # one column more than slots, the first: there the -1 of padded rows are counted, when 1 is added to all ids
        counts = torch.zeros(config.num_layers, config.num_physical + 1, dtype=torch.int32, device=config.device)
        self._all = counts
        self.physical = counts[:, 1:]  # [L, P]
        self._rows = list((counts if config.padded else self.physical).unbind(0))
        local = config.num_physical // config.ep_size
        self._local = self.physical[:, config.ep_rank * local : (config.ep_rank + 1) * local]
        self._ones: dict[int, Tensor] = {}
        self._per_token = config.mode == "per_token"
        self._topk_ids = torch.empty(0)
        self.details: dict[str, Any] = {}
        """Of per_token: what the record says of the batch."""

    def begin(
        self, input_ids: Tensor, positions: Tensor, extend_seq_lens: Sequence[int] | None, forward_mode: int
    ) -> None:
        """Forgets what was counted; `input_ids` and `positions` are [T]."""
        self._all.zero_()
        if not self._per_token:
            return
        shape = (len(self._rows), input_ids.shape[0], MAX_TOP_K)
        self._topk_ids = torch.full(shape, -1, dtype=torch.int32, device=self._device)
        self.details = {
            "input_ids": input_ids.tolist(),
            "positions": positions.tolist(),
            "extend_seq_lens": None if extend_seq_lens is None else list(extend_seq_lens),
            "forward_mode": forward_mode,
            "misc_objects": [],
        }

    def add_choices(self, layer: int, topk_ids: Tensor) -> None:
        """topk_ids int [T, K] physical."""
        ids = topk_ids.reshape(-1)
        count = ids.numel()
        ones = self._ones.get(count)
        if ones is None:
            ones = self._ones[count] = torch.ones(count, dtype=torch.int32, device=self._device)
        self._rows[layer].index_add_(0, ids + 1 if self._padded else ids, ones)
        if self._per_token:
            self._topk_ids[layer, : topk_ids.shape[0], : topk_ids.shape[1]] = topk_ids

    def add_arrivals(self, layer: int, counts: Tensor | Sequence[int]) -> None:
        """counts [P/G] of this rank's slots."""
        self._local[layer] += torch.as_tensor(counts, dtype=torch.int32, device=self._device)

    def token_choices(self) -> Tensor:
        """int32 [L, T, 8] on the host, -1 where unused."""
        return self._topk_ids.cpu()
