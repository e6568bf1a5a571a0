"""A weight and the kernel that multiplies by it.

Legend: T tokens, K in-features, N out-features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_engine.kernels.linear.protocol import LinearKernel
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.share import WHOLE, Share


class Linear:
    """x [T, K] -> x @ W.T (+ bias) [T, N]."""

    def __init__(self, kernel: LinearKernel, weight: Tensor, bias: Tensor | None = None) -> None:
        self._run = kernel.run
        self.weight = kernel.prepare(weight, bias)

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x, self.weight)


def load_linear(
    kernel: LinearKernel,
    reader: WeightSource,
    prefixes: Sequence[str],
    out_features: Sequence[int],
    in_features: int,
    bias: bool = False,
    out_shares: Sequence[Share] = (),
    in_share: Share = WHOLE,
) -> Linear:
    """One product out of several projections of the same input: their rows stacked in the order given.

    Args:
        out_features, in_features: of the whole projections.
        out_shares: the part of each one's rows that this rank holds (column parallel); default whole.
        in_share: the part of the columns (row parallel): products are summands, and the first rank's alone have the
            bias.
    """
    shares = out_shares or [WHOLE] * len(prefixes)
    counts = [share.width(rows) for share, rows in zip(shares, out_features)]
    total, cols = sum(counts), in_share.cut(in_features)
    has_bias = bias and in_share.is_first
    weight = torch.empty(total, in_share.width(in_features), dtype=reader.dtype, device=reader.device)
    biases = torch.empty(total, dtype=reader.dtype, device=reader.device) if has_bias else None
    start = 0
    for prefix, rows, share, count in zip(prefixes, out_features, shares, counts):
        part = share.cut(rows)
        reader.linear(prefix, (rows, in_features), rows=part, cols=cols, out=weight[start : start + count])
        if biases is not None:
            reader.tensor(prefix + ".bias", (rows,), rows=part, out=biases[start : start + count])
        elif bias:
            reader.skip(prefix + ".bias")
        start += count
    return Linear(kernel, weight, biases)
