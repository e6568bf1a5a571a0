"""LoRA products in plain torch: two products per adapter of the step.

Legend: as in protocol.py.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from moe_engine.kernels.lora.protocol import AdapterTokens, LoraWeights


class TorchLora:
    """`LoraKernel` for any device and dtype."""

    name = "torch"

    def add(self, y: Tensor, x: Tensor, weights: LoraWeights, tokens: AdapterTokens) -> None:
        rank, columns = weights.rank, weights.columns
        for slot, begin, end in tokens.runs:
            rows = tokens.order[begin:end]
            inner = x.index_select(0, rows) @ weights.a[slot].T  # [n, P * R]
            parts = [
                inner[:, p * rank : (p + 1) * rank] @ weights.b[slot, :, first:last]
                for p, (first, last) in enumerate(pairwise(columns))
            ]
            y.index_add_(0, rows, torch.cat(parts, dim=1))

    def add_heads(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, tokens: AdapterTokens) -> None:
        for slot, begin, end in tokens.runs:
            rows = tokens.order[begin:end]
            inner = x.index_select(0, rows).transpose(0, 1) @ a[slot].transpose(1, 2)  # [H, n, R]
            y.index_add_(0, rows, (inner @ b[slot]).transpose(0, 1))
