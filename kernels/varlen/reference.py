"""Attention within runs in plain torch: one product for neighboring runs of equal length.

Legend: as in protocol.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class TorchVarlen:
    """`VarlenKernel` for any device and dtype."""

    name = "torch"

    def run(self, q: Tensor, k: Tensor, v: Tensor, lens: Sequence[int], scale: float) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        start = 0
        for length, same in groupby(lens):
            runs = sum(1 for _ in same)
            stop = start + runs * length
            own = [x[start:stop].unflatten(0, (runs, length)).transpose(1, 2) for x in (q, k, v)]  # [runs, H, L, Dh]
            mixed = scaled_dot_product_attention(own[0], own[1], own[2], scale=scale)
            out[start:stop] = mixed.transpose(1, 2).flatten(0, 1)
            start = stop
        return out
