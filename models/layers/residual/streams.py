"""Residual streams: norms that read a weighted sum of the streams and write to all of them.

Layers handle the residual of `kernels.ops.streams` as any other: each norm adds the result before it, then norms the
next part's input.

Legend: T tokens, D hidden, n streams.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.ops.protocol import Ops
from moe_engine.kernels.ops.streams import StreamWeights, mix_streams
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.compressed import StreamsConfig
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.layers.residual.residual_norm import ResidualNorm
from moe_engine.models.weights import WeightSource


def spread(x: Tensor, streams: StreamsConfig) -> Tensor:
    """x [T, D] -> a residual whose streams all are x. The weights after them are unset: a norm sets them first."""
    n, width = streams.count, x.shape[1]
    residual = x.new_empty(len(x), n * width + streams.width)
    residual[:, : n * width].unflatten(1, (n, width)).copy_(x.unsqueeze(1))
    if streams.late:
        first = n * width + n + n * n
        residual[:, first : first + n] = 0.0
        residual[:, first] = 1.0
    return residual


class StreamNorm(ResidualNorm):
    """`RMSNorm` on streams: adds a result to them, then norms their sum with weights that depend on them.

    Args:
        prefix: of the weights of the streams. norm: prefix of the norm.
        is_last: the sum is the head's input; no result is added after it.
    """

    _norm: RMSNorm

    def __init__(
        self, ops: Ops, reader: WeightSource, prefix: str, norm: str, config: ModelConfig, is_last: bool = False
    ) -> None:
        super().__init__(ops, reader, norm, config)
        streams = config.streams
        assert streams is not None
        n, width, wide = streams.count, config.hidden_size, torch.float32
        numbers = n if is_last else n * (2 + n)
        if is_last and (streams.late or streams.mean_head):
            fn, base = torch.empty((0, n * width), device=reader.device), torch.empty(0, device=reader.device)
            scale = base
        else:
            fn = reader.tensor(f"{prefix}.fn", (numbers, n * width), dtype=wide)
            base = reader.tensor(f"{prefix}.base", (numbers,), dtype=wide)
            scale = reader.tensor(f"{prefix}.scale", (1 if is_last else 3,), dtype=wide)
            scale = torch.cat([part.expand(count) for part, count in zip(scale, (n, n, n * n))])
        self._weights = StreamWeights(
            fn, base, scale, n, streams.iterations, config.norm_eps, streams.eps, streams.late
        )
        self._mix = ops.capabilities.mix_streams or mix_streams
        self._mix_norm = ops.capabilities.mix_norm_streams

    def __call__(self, residual: Tensor) -> Any:
        """The norm of the weighted sum of new streams."""
        return self._normed(None, residual)

    def add(self, x: Tensor, residual: Tensor, other: Tensor | None = None) -> Any:
        """Adds x [T, D] to the streams, in place; then as `__call__`."""
        assert other is None
        return self._normed(x, residual)

    def write(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds x [T, D] to the streams, in place; returns them, [T, n D]."""
        self._read(x, residual)
        return residual[:, : self._weights.fn.shape[1]].contiguous()

    def _normed(self, x: Tensor | None, residual: Tensor) -> Any:
        """The norm of the sum of the streams, after x is added to them."""
        if self._mix_norm is None or not len(residual):
            return self._norm(self._read(x, residual))
        return self._norm.of_mixed(self._mix_norm, self._to_add(x, residual), residual, self._weights)

    def _read(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """The sum of the streams, after x is added to them."""
        if not len(residual):  # an idle attention group, whose x has any width
            return residual[:, : self.width]
        return self._mix(self._to_add(x, residual), residual, self._weights)

    def _to_add(self, x: Tensor | None, residual: Tensor) -> Tensor | None:
        """What is added to the streams by the call that reads them."""
        return x if x is None or self._all_reduce is None else self._all_reduce.sum(x)
