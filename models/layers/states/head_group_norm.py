"""Norm over the results of groups of adjacent heads (lightning attention).

Legend: T tokens, H heads of this rank, Dh width of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_engine.kernels.ops.protocol import HeadNorms, Ops
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.layers.attention.projection_norm import scaled
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.collectives import Group
from moe_engine.parallel.share import Share


class HeadGroupNorm:
    """x [T, H Dh] -> x * rsqrt(mean of x^2 over the channel's group + eps) * weight. If groups are on several ranks,
    the sums of squares are added over the attention group, in one all-reduce of a number for each token and group.

    Args:
        name: of the weight. channels: of all heads of all ranks. groups: equal parts of the channels.
    """

    def __init__(
        self, ops: Ops, reader: WeightSource, name: str, channels: int, groups: int, eps: float, group: Group
    ) -> None:
        share = Share.of(group)
        own, self._width = share.width(channels), channels // groups
        self._ops, self._eps, self._group, self._num_groups = ops, eps, group, groups
        self._weight = reader.tensor(name, (channels,), Cut(share.cut(channels)), dtype=torch.float32)
        self._parts: list[int] = []
        """The group of each part of the channels; []: the rank has whole groups."""
        self._each: HeadNorms | None = None
        if own % self._width:
            self._part = math.gcd(own, self._width)
            first = share.rank * own
            self._parts = [(first + begin) // self._width for begin in range(0, own, self._part)]
        elif own > self._width:
            ones = torch.ones(self._width, device=reader.device)
            self._each = HeadNorms(ones, ones, eps)  # not a weight of the model, see `footprint`

    def __call__(self, x: Tensor) -> Tensor:
        """x is contiguous."""
        if self._parts:
            return scaled(x, self._scales(x), self._weight)
        if self._each is None:
            return self._ops.rms_norm(x, self._weight, self._eps)
        normed = self._ops.rms_norm(x.unflatten(1, (-1, self._width)), self._each.q, self._eps)
        return normed.flatten(1).mul_(self._weight)

    def _scales(self, x: Tensor) -> Tensor:
        """The factor of each channel, [T, H Dh]."""
        squares = torch.linalg.vector_norm(x.unflatten(1, (-1, self._part)), dim=-1, dtype=torch.float32).square_()
        sums = squares.new_zeros(len(x), self._num_groups)
        for i, group in enumerate(self._parts):
            sums[:, group] += squares[:, i]
        scales = self._group.all_reduce(sums).div_(self._width).add_(self._eps).rsqrt_()
        return torch.cat([scales[:, group : group + 1].expand(-1, self._part) for group in self._parts], 1)
