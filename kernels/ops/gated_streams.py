"""Residual streams with gates of low rank: each part of a layer reads a gated mean of the normed streams, and adds its
result to each stream with a weight (Qwen3.8-Flash-Next).

    s_j = norm of stream j, by weights of its own;   s = all of them side by side
    read = mean over j of sigmoid(up(silu(down(s) / n)))_j * s_j
    written to stream j: 2 sigmoid((inject(s) / n)_j) times the result

The residual is one tensor [T, n D + n]: the streams, then the weights with which the next result is added.

Legend: T tokens, D hidden, n streams, r rank.
Source: transformers (qwen4_exp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class GatedStreams:
    """The work of a read in addition to its products."""

    norm: Callable[[Tensor | None, Tensor, Tensor, float], Tensor]
    """(x, residual, weight, eps): `write_gated` of x, if there is one, then `norm_streams`."""

    gate: Callable[[Tensor, int, int, Tensor | None], Tensor]
    """(projected, r, n, residual): `rank_gates` of the first r numbers [T, >= r], and with a residual `set_weights` by
    the n numbers after them."""

    read: Callable[[Tensor, Tensor, int], Tensor]
    """`read_streams`."""


def norm_streams(residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of each stream of residual [T, >= n D], by weight [n, D] float32 -> [T, n D] in its dtype."""
    streams = residual[:, : weight.numel()].float().unflatten(1, weight.shape)
    normed = streams * torch.rsqrt(streams.square().mean(2, keepdim=True) + eps)
    return normed.mul_(weight).flatten(1).to(residual.dtype)


def rank_gates(projected: Tensor, count: int) -> Tensor:
    """down(s) [T, r] -> what `up` reads."""
    return functional.silu(projected.float() / count).to(projected.dtype)


def read_streams(gates: Tensor, normed: Tensor, count: int) -> Tensor:
    """up(...) and s, [T, n D] each -> [T, D]."""
    gated = gates.float().sigmoid().mul_(normed.float())
    return gated.unflatten(1, (count, -1)).mean(1).to(normed.dtype)


def set_weights(projected: Tensor, residual: Tensor) -> None:
    """inject(s) [T, n] -> the weights of the next result, after the streams."""
    count = projected.shape[1]
    residual[:, -count:] = 2 * (projected.float() / count).sigmoid()


def write_gated(x: Tensor, residual: Tensor, count: int) -> None:
    """Adds x [T, D] to the streams, in place."""
    width = count * x.shape[1]
    streams = residual[:, :width].unflatten(1, (count, x.shape[1]))
    streams += residual[:, width : width + count].unsqueeze(2) * x.unsqueeze(1)


def norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`GatedStreams.norm` in torch."""
    if x is not None:
        write_gated(x, residual, len(weight))
    return norm_streams(residual, weight, eps)


def gate(projected: Tensor, rank: int, count: int, residual: Tensor | None) -> Tensor:
    """`GatedStreams.gate` in torch."""
    if residual is not None:
        set_weights(projected[:, rank:], residual)
    return rank_gates(projected[:, :rank], count)


IN_TORCH = GatedStreams(norm, gate, read_streams)
"""For any device."""
