"""A weight and the kernel that multiplies by it.

Legend: T tokens, K in-features, N out-features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_engine.kernels.linear.protocol import BlockScaledLinear, LinearKernel
from moe_engine.kernels.quantization.protocol import BLOCK, UNQUANTIZED, Activation, BlockWeight, as_format
from moe_engine.models.cut import Cut
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.share import WHOLE, Share


class Linear:
    """x [T, K] -> x @ W.T (+ bias) [T, N]."""

    def __init__(self, kernel: LinearKernel, weight: Tensor | BlockWeight, bias: Tensor | None = None) -> None:
        self._run: Callable[..., Tensor] = kernel.run
        if isinstance(weight, BlockWeight):
            assert isinstance(kernel, BlockScaledLinear)
            self.weight = kernel.prepare_blocks(weight, bias)
        else:
            self.weight = kernel.prepare(weight, bias)
        self.input_format = kernel.input_format(self.weight) if isinstance(kernel, BlockScaledLinear) else UNQUANTIZED
        """In which form it wants x."""

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes

    def __call__(self, x: Activation) -> Tensor:
        return self._run(as_format(x, self.input_format), self.weight)


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

    Block-FP8 weights stay as they are stored where the kernel multiplies with them and no block is cut, by a share or
    by stacking; else they are dequantised.

    Args:
        out_features, in_features: of the whole projections.
        out_shares: the part of each one's rows that this rank holds (column parallel); default whole.
        in_share: the part of the columns (row parallel): products are summands, and the first rank's alone have the
            bias.
    """
    shares = out_shares or [WHOLE] * len(prefixes)
    counts = [share.width(rows) for share, rows in zip(shares, out_features)]
    total, cuts = sum(counts), [Cut(s.cut(rows), in_share.cut(in_features)) for s, rows in zip(shares, out_features)]
    has_bias = bias and in_share.is_first
    keeps = isinstance(kernel, BlockScaledLinear) and all(
        reader.keeps_blocks(prefix, (rows, in_features), cut) for prefix, rows, cut in zip(prefixes, out_features, cuts)
    )
    width = in_share.width(in_features)
    weight: Tensor | BlockWeight
    if keeps and all(count % BLOCK == 0 for count in counts[:-1]):
        weight = BlockWeight.empty(total, width, reader.device, reader.power_of_two)
    else:
        weight = torch.empty(total, width, dtype=reader.dtype, device=reader.device)
    biases = torch.empty(total, dtype=reader.dtype, device=reader.device) if has_bias else None
    start = 0
    for prefix, rows, cut, count in zip(prefixes, out_features, cuts, counts):
        stop = start + count
        if isinstance(weight, BlockWeight):
            reader.blocks(prefix, (rows, in_features), cut, out=weight.rows(start, stop))
        else:
            reader.linear(prefix, (rows, in_features), cut, out=weight[start:stop])
        if biases is not None:
            reader.tensor(prefix + ".bias", (rows,), Cut(cut.rows), out=biases[start:stop])
        elif bias:
            reader.skip(prefix + ".bias")
        start = stop
    return Linear(kernel, weight, biases)
