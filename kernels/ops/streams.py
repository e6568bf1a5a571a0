"""Residual streams (hyper-connections): a part of a layer reads a weighted sum of the streams, and writes to all.

The residual is one tensor [T, n D + n + n n]: the streams, then the weights with which the next result is added: of the
result to each stream, and of the streams to each other (row i of the matrix: of stream i to the new ones). With late
sums n weights follow, of the sum that the next part reads.

Legend: T tokens, D hidden, n streams.
Source: Manifold-Constrained Hyper-Connections (mHC), arXiv 2512.24880; DeepSeek-V4's release, `inference/model.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat


@dataclass(frozen=True)
class StreamWeights:
    """float32. The numbers of a token are norm(streams) @ fn.T * scale + base: n for the sum that is read, then, unless
    no result is written after it (the model's head), n for the result and n x n for the streams.

    `eps` is that of the norm, `floor` is added to the weights of the sum and to the matrix, which `iterations` of
    Sinkhorn's algorithm make doubly stochastic.
    """

    fn: Tensor  # [n or n (2 + n), n D]
    base: Tensor
    scale: Tensor
    count: int
    iterations: int
    eps: float
    floor: float

    late: bool = False
    """The sum that a part reads has the weights that the part before has computed (DeepSeek V4.1).

    Without numbers (`fn` has no rows) only that sum is read, or, if sums are not late, the mean of the streams
    (GLM-5.3-Flash)."""

    @property
    def writes(self) -> bool:
        """Whether a result is written after the sum is read."""
        return len(self.base) > self.count


class MixStreams(Protocol):
    """All work on the streams between two parts of a layer."""

    def __call__(self, x: Tensor | None, residual: Tensor, weights: StreamWeights) -> Tensor:
        """Adds x [T, D] to the streams by the weights in residual, in place (None: the residual is new); sets those of
        the next result; returns the sum that the next part reads, [T, D], in the residual's dtype. Float32 inside."""


class MixNormStreams(Protocol):
    """`MixStreams`, and the norm of the sum that is read."""

    def __call__(
        self, x: Tensor | None, residual: Tensor, weights: StreamWeights, format: ActivationFormat, norm: Tensor,
        eps: float,
    ) -> Activation:  # fmt: skip
        """`Ops.rms_norm` of the sum, by weight `norm` [D], in `format`."""


def write_streams(x: Tensor, residual: Tensor, weights: StreamWeights) -> None:
    """The first part of `MixStreams`: adds x [T, D] to the streams, in place."""
    n, width = weights.count, weights.fn.shape[1]
    streams = residual[:, :width].float().view(len(residual), n, width // n)
    written, mixed = residual[:, width : width + n].float(), residual[:, width + n : width + n + n * n].float()
    streams = torch.einsum("tij,tid->tjd", mixed.view(-1, n, n), streams)
    residual[:, :width] = streams.addcmul_(written.unsqueeze(2), x.float().unsqueeze(1)).flatten(1)


def mix_streams(x: Tensor | None, residual: Tensor, weights: StreamWeights) -> Tensor:
    """`MixStreams` in torch."""
    n = weights.count
    width = weights.fn.shape[1]
    end = width + n + n * n
    if x is not None:
        write_streams(x, residual, weights)
    streams = residual[:, :width].float().view(len(residual), n, width // n)  # as other parts read them
    before = residual[:, end : end + n].to(torch.float32, copy=True)
    if not len(weights.base):
        sums = torch.einsum("tn,tnd->td", before, streams) if weights.late else streams.mean(1)
        return sums.to(residual.dtype)
    flat = streams.flatten(1)
    numbers = linear(flat, weights.fn).mul_(torch.rsqrt(flat.square().mean(1, keepdim=True) + weights.eps))
    numbers = numbers.mul_(weights.scale).add_(weights.base)
    if weights.writes:
        residual[:, width : width + n] = 2 * numbers[:, n : 2 * n].sigmoid()
        residual[:, width + n : end] = _doubly_stochastic(numbers[:, 2 * n :].view(-1, n, n), weights).flatten(1)
    read = numbers[:, :n].sigmoid() + weights.floor
    if weights.late:
        residual[:, end : end + n], read = read, before
    return torch.einsum("tn,tnd->td", read, streams).to(residual.dtype)


def _doubly_stochastic(logits: Tensor, weights: StreamWeights) -> Tensor:
    """[T, n, n] -> rows and columns that sum to 1."""
    floor = weights.floor
    matrix = logits.softmax(-1) + floor
    matrix = matrix / (matrix.sum(-2, keepdim=True) + floor)
    for _ in range(weights.iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + floor)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + floor)
    return matrix
