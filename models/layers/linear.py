"""A weight and its linear kernel.

Legend: T tokens, K in-features, N out-features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_engine.kernels.linear.protocol import LinearKernel
from moe_engine.kernels.quantization.protocol import BLOCK, Activation, BlockWeight, as_format
from moe_engine.models.cut import Cut
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.share import WHOLE, Share


class Linear:
    """x [T, K] -> x @ W.T (+ bias) [T, N]."""

    def __init__(self, kernel: LinearKernel, weight: Tensor | BlockWeight, bias: Tensor | None = None) -> None:
        self._run: Callable[..., Tensor] = kernel.run
        if isinstance(weight, BlockWeight):
            prepare_blocks = kernel.capabilities.prepare_blocks
            assert prepare_blocks is not None
            self.weight = prepare_blocks(weight, bias)
        else:
            self.weight = kernel.prepare(weight, bias)
        self.input_format = kernel.input_format(self.weight)
        """Activation format of x."""

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
    """Merges several projections of the same input into one product: rows stacked in the given order.

    Block-FP8 weights stay FP8 if the kernel supports it and no block is split, by sharding or by stacking; else they
    are dequantized.

    Args:
        out_features, in_features: of the unsharded projections.
        out_shares: this rank's part of each projection's rows (column parallel); default: all.
        in_share: this rank's part of the columns (row parallel): products are partial sums, and only the first rank has
            the bias.
    """
    shares = out_shares or [WHOLE] * len(prefixes)
    counts = [share.width(rows) for share, rows in zip(shares, out_features)]
    total, cuts = sum(counts), [Cut(s.cut(rows), in_share.cut(in_features)) for s, rows in zip(shares, out_features)]
    has_bias = bias and in_share.is_first
    keeps = kernel.capabilities.prepare_blocks is not None and all(
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
