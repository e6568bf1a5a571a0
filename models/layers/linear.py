"""A weight and the kernel that multiplies by it.

Legend: T tokens, K in-features, N out-features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_engine.kernels.linear.protocol import LinearKernel
from moe_engine.models.weights import WeightSource


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
) -> Linear:
    """One product out of several projections of the same input: their rows stacked in the order given."""
    total = sum(out_features)
    weight = torch.empty(total, in_features, dtype=reader.dtype, device=reader.device)
    biases = torch.empty(total, dtype=reader.dtype, device=reader.device) if bias else None
    start = 0
    for prefix, rows in zip(prefixes, out_features):
        reader.linear(prefix, (rows, in_features), out=weight[start : start + rows])
        if biases is not None:
            reader.tensor(prefix + ".bias", (rows,), out=biases[start : start + rows])
        start += rows
    return Linear(kernel, weight, biases)
