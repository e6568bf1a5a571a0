"""The norms of residual streams with gates of low rank (`kernels.ops.gated_streams`; Qwen3.8-Flash-Next).

Layers handle the residual as any other: each norm adds the result before it, then reads the next part's input.

Legend: T tokens, D hidden, n streams, r rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_engine.kernels.linear.protocol import LinearKernel
from moe_engine.kernels.ops.gated_streams import IN_TORCH, write_gated
from moe_engine.kernels.ops.protocol import Ops
from moe_engine.kernels.quantization.protocol import ActivationFormat
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.weights import WeightSource

if TYPE_CHECKING:
    from moe_engine.parallel.all_reduce.custom import CustomAllReduce


class StreamAdder:
    """Replaces `RMSNorm` before a layer that changes the streams first: adds the result before it, and returns the
    streams [T, n D] themselves.

    Args:
        count: n. width: D.
    """

    fuses_router = adds_pairs = adds_rows = False

    def __init__(self, count: int, width: int) -> None:
        self.count, self.width = count, width
        self._all_reduce: CustomAllReduce | None = None

    def feed(self, *readers: ActivationFormat) -> None:
        """See `RMSNorm`: results are not quantized."""

    def keep_unquantized(self) -> None:
        """See `RMSNorm`."""

    def sum_over(self, all_reduce: CustomAllReduce) -> None:
        """From now on `add` gets partial sums of the ranks' rows."""
        self._all_reduce = all_reduce

    def __call__(self, residual: Tensor) -> Tensor:
        """The input of the next part."""
        return self.stream(residual)

    def add(self, x: Tensor, residual: Tensor, other: Tensor | None = None) -> Tensor:
        """Adds x [T, D] to the streams, in place; then as `__call__`."""
        assert other is None
        self._add(x, residual)
        return self(residual)

    def write(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds x [T, D] to the streams, in place; returns them, [T, n D]."""
        self._add(x, residual)
        return self.stream(residual).contiguous()

    def _add(self, x: Tensor, residual: Tensor) -> None:
        if len(residual):  # an idle attention group has an x of any width
            write_gated(x if self._all_reduce is None else self._all_reduce.sum(x), residual, self.count)

    def stream(self, residual: Tensor) -> Tensor:
        """All streams."""
        return residual[:, : self.count * self.width]


class GatedStreamNorm(StreamAdder):
    """The input of a part of a layer: a gated mean of the streams.

    Args:
        prefix: of the weights of the streams.
        is_last: the result is the head's input; no result is added after it.
    """

    def __init__(
        self, ops: Ops, linear: LinearKernel, reader: WeightSource, prefix: str, config: ModelConfig,
        is_last: bool = False,
    ) -> None:  # fmt: skip
        streams = config.streams
        assert streams is not None and streams.rank
        super().__init__(streams.count, config.hidden_size)
        self._ops = ops.capabilities.gated_streams or IN_TORCH
        self._rank, self._eps, wide = streams.rank, config.norm_eps, streams.count * config.hidden_size
        weight = reader.tensor(f"{prefix}.hc_norm.weight", (wide,), dtype=torch.float32)
        if not reader.made_up:
            weight += config.norm_plus
        self._weight = weight.view(streams.count, config.hidden_size)
        names, rows = [f"{prefix}.input_mix_weight_down"], [streams.rank]
        if not is_last:
            names, rows = [*names, f"{prefix}.block_inject_weight"], [*rows, streams.count]
        self._down = load_linear(linear, reader, names, rows, wide)
        self._up = load_linear(linear, reader, [f"{prefix}.input_mix_weight_up"], [wide], streams.rank)
        self._writes = not is_last

    def __call__(self, residual: Tensor) -> Tensor:
        return self._read(None, residual)

    def add(self, x: Tensor, residual: Tensor, other: Tensor | None = None) -> Tensor:
        assert other is None
        if not len(residual):
            return self(residual)
        return self._read(x if self._all_reduce is None else self._all_reduce.sum(x), residual)

    def _read(self, x: Tensor | None, residual: Tensor) -> Tensor:
        if not len(residual):
            return residual[:, : self.width]
        normed = self._ops.norm(x, residual, self._weight, self._eps)
        projected = self._down(normed)
        gates = self._up(self._ops.gate(projected, self._rank, self.count, residual if self._writes else None))
        return self._ops.read(gates, normed, self.count)
