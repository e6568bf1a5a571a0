"""Residual streams (hyper-connections): norms that read a weighted sum of the streams and write to all of them.

The residual is one tensor [T, n D + n + n n]: the streams, then the weights with which the next result is added: of the
result to each stream, and of the streams to each other. Layers handle it as any residual: each norm adds the result
before it, then norms the next part's input.

Legend: T tokens, D hidden, n streams.
Source: Manifold-Constrained Hyper-Connections (mHC), arXiv 2512.24880; DeepSeek-V4's release, `inference/model.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.ops.protocol import Ops
from moe_engine.kernels.quantization.protocol import ActivationFormat
from moe_engine.models.compressed_config import StreamsConfig
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.all_reduce.custom import CustomAllReduce


def spread(x: Tensor, streams: StreamsConfig) -> Tensor:
    """x [T, D] -> a residual whose streams all are x."""
    n = streams.count
    return torch.cat((x.repeat(1, n), x.new_zeros(len(x), n + n * n)), 1)


class StreamNorm:
    """`RMSNorm` on streams: adds a result to them, then norms their sum with weights that depend on them.

    Args:
        prefix: of the weights of the streams. norm: prefix of the norm.
        is_last: the sum is the head's input; no result is added after it.
    """

    fuses_router = adds_pairs = adds_rows = False

    def __init__(
        self, ops: Ops, reader: WeightSource, prefix: str, norm: str, config: ModelConfig, is_last: bool = False
    ) -> None:
        streams = config.streams
        assert streams is not None
        self._streams, self._eps, self._width = streams, config.norm_eps, config.hidden_size
        n, wide = streams.count, torch.float32
        numbers = n if is_last else n * (2 + n)
        self._fn = reader.tensor(f"{prefix}.fn", (numbers, n * self._width), dtype=wide)
        self._base = reader.tensor(f"{prefix}.base", (numbers,), dtype=wide)
        scale = reader.tensor(f"{prefix}.scale", (1 if is_last else 3,), dtype=wide)
        counts = [n] if is_last else [n, n, n * n]
        self._scale = torch.cat([part.expand(count) for part, count in zip(scale.split(1), counts)])
        self._is_last = is_last
        self._norm = RMSNorm(ops, reader, norm, self._width, config.norm_eps)
        self._all_reduce: CustomAllReduce | None = None

    @property
    def weight(self) -> Tensor:
        return self._norm.weight

    def feed(self, *readers: ActivationFormat) -> None:
        """See `RMSNorm`."""
        self._norm.feed(*readers)

    def keep_unquantized(self) -> None:
        """See `RMSNorm`."""
        self._norm.keep_unquantized()

    def sum_over(self, all_reduce: CustomAllReduce) -> None:
        """From now on `add` gets partial sums of the ranks' rows."""
        self._all_reduce = all_reduce

    def __call__(self, residual: Tensor) -> Any:
        """The norm of the weighted sum of the streams; sets the weights of the next result."""
        n, width = self._streams.count, self._width
        streams = residual[:, : n * width].float()
        mixes = torch.nn.functional.linear(streams, self._fn)
        mixes *= torch.rsqrt(streams.square().mean(1, keepdim=True) + self._eps)
        mixes = mixes.mul_(self._scale).add_(self._base)
        read = mixes[:, :n].sigmoid() + self._streams.eps
        if not self._is_last:
            residual[:, n * width : n * width + n] = 2 * mixes[:, n : 2 * n].sigmoid()
            residual[:, n * width + n :] = self._doubly_stochastic(mixes[:, 2 * n :].view(-1, n, n)).flatten(1)
        summed = torch.einsum("tn,tnd->td", read, streams.view(-1, n, width))
        return self._norm(summed.to(residual.dtype))

    def add(self, x: Tensor, residual: Tensor, other: Tensor | None = None) -> Any:
        """`write`, then as `__call__`."""
        assert other is None
        self.write(x, residual)
        return self(residual)

    def streams_of(self, residual: Tensor) -> Tensor:
        """The streams [T, n D], a view."""
        return residual[:, : self._streams.count * self._width]

    def write(self, x: Tensor, residual: Tensor) -> None:
        """Mixes the streams and adds x [T, D] to them, in place."""
        if not len(residual):
            return  # a layer without tokens has no x
        if self._all_reduce is not None:
            x = self._all_reduce.sum(x)
        n, width = self._streams.count, self._width
        streams = residual[:, : n * width].view(-1, n, width)
        written = residual[:, n * width : n * width + n]
        mixed = residual[:, n * width + n :].view(-1, n, n)
        new = torch.einsum("tij,tid->tjd", mixed.float(), streams.float())
        residual[:, : n * width] = new.addcmul_(written.float().unsqueeze(2), x.float().unsqueeze(1)).flatten(1)

    def _doubly_stochastic(self, logits: Tensor) -> Tensor:
        """[T, n, n] -> rows and columns that sum to 1, by Sinkhorn's iterations."""
        eps = self._streams.eps
        matrix = logits.softmax(-1) + eps
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
        for _ in range(self._streams.iterations - 1):
            matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
            matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
        return matrix
