"""Attention over blocks of the residual (Kimi K3): a part of a layer reads a weighted sum of the embedding and of the
sums of results of each block of layers, and writes to the sum of its own block.

The residual is one tensor [T, N D]: row 0 of a token is its embedding, row b the sum of results of block b. A part in
block b reads rows 0 to b; the weights are a softmax over the rows' scores.

Legend: T tokens, D hidden, N rows of a token.
Source: Attention Residuals, arXiv 2603.15031; Kimi K3's report, arXiv 2607.24653.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockWeights:
    """float32. The score of a row is proj . (norm * row / rms(row)).

    `written`: the row to which a result is added; all rows up to it are read. `starts`: the result is the row's first.
    """

    norm: Tensor  # [D]
    proj: Tensor  # [D]
    eps: float
    written: int
    starts: bool = False


class MixBlocks(Protocol):
    """All work on the residual between two parts of a layer, with the norm of what is read."""

    def __call__(self, x: Tensor | None, residual: Tensor, weights: BlockWeights, norm: Tensor | None) -> Tensor:
        """Adds x [T, D] to the written row, in place (None: nothing is added); returns the weighted sum of the rows in
        the residual's dtype, with a `norm` [D] its `Ops.rms_norm` with the same eps. [T, D], float32 inside."""


def mix_blocks(x: Tensor | None, residual: Tensor, weights: BlockWeights, norm: Tensor | None) -> Tensor:
    """`MixBlocks` in torch."""
    width, last = len(weights.norm), weights.written
    rows = residual[:, : (last + 1) * width].unflatten(1, (last + 1, width))
    if x is not None and weights.starts:
        rows[:, last] = x
    elif x is not None:
        rows[:, last] += x
    wide = rows.float()
    scores = (wide * (weights.norm * weights.proj)).sum(-1) * _rms_factor(wide, weights.eps).squeeze(-1)  # [T, N]
    read = torch.einsum("tn,tnd->td", scores.softmax(-1), wide).to(residual.dtype)
    if norm is None:
        return read
    wide = read.float()
    return ((wide * _rms_factor(wide, weights.eps)).to(read.dtype) * norm).to(read.dtype)


def _rms_factor(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
