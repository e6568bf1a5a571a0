"""Base of the GPU linear rows: products with unquantized weights by torch (cuBLAS).

Legend: T tokens, H heads, K in-features, N out-features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.linear.reference import TorchLinear


class CublasLinear(TorchLinear):
    """`LinearKernel` whose per-head products are written directly to `out`. The torch row copies them; the copy is
    needed under torch.compile only."""

    def run_heads(self, x: Tensor, weight: PreparedLinear, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = x.new_empty(x.shape[0], x.shape[1], weight.out_features)
        torch.bmm(x.transpose(0, 1), weight.data.transpose(1, 2), out=out.transpose(0, 1))
        return out
