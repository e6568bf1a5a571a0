"""Rounding of vectors to the numbers of formats with a scale for each block of channels, without storing them.

DeepSeek V4.1 is trained with caches in these formats: the values that they can hold are a part of the model. Widths
that have no whole blocks are not rounded, as in the reference.

Source: DeepSeek V4.1's release, `inference/kernel.py`, as transformers describes it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_engine.kernels.ops.protocol import CacheRows, Ops, RotaryTable
from moe_engine.kernels.powers_of_two import power_of_two_above

_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_LEAST_E4M3, _LEAST_E2M1, _LEAST_SCALE = 1e-4, _E2M1_MAX * 2.0**-126, _E2M1_MAX * 2.0**-9
"""The least maximum of a block: for e4m3, for e2m1 with a power of two, and with a scale in e4m3."""
BLOCK, SMALL_BLOCK = 32, 16


def round_e4m3(x: Tensor) -> Tensor:
    """x [..., W] in e4m3, blocks of 32 with a power of two as scale -> x's dtype."""
    return _rounded(x, BLOCK, _LEAST_E4M3, lambda most: power_of_two_above(most * (1.0 / _E4M3_MAX)), _to_e4m3)


def round_e2m1(x: Tensor) -> Tensor:
    """x [..., W] in e2m1, blocks of 32 with a power of two as scale -> x's dtype."""
    return _rounded(x, BLOCK, _LEAST_E2M1, lambda most: power_of_two_above(most * (1.0 / _E2M1_MAX)), _to_e2m1)


def round_e2m1_small(x: Tensor) -> Tensor:
    """x [..., W] in e2m1, blocks of 16 with a scale in e4m3 -> x's dtype."""
    return _rounded(
        x, SMALL_BLOCK, _LEAST_SCALE, lambda most: (most / _E2M1_MAX).to(torch.float8_e4m3fn).float(), _to_e2m1
    )


E4M3, E2M1, E2M1_SMALL = "e4m3", "e2m1", "e2m1_small"
ROUNDINGS = {E4M3: round_e4m3, E2M1: round_e2m1, E2M1_SMALL: round_e2m1_small}


def round_rows(
    ops: Ops, x: Tensor, norm: tuple[Tensor, float] | None, positions: Tensor, table: RotaryTable, rounding: str,
    to: CacheRows | None = None, q: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`RoundRows` by separate operations."""
    if q is not None:
        ops.rotate(q, positions, table)
    if norm is not None:
        x = ops.rms_norm(x, *norm)
    ops.rotate(x, positions, table)
    x = ROUNDINGS[rounding](x)
    if to is None:
        return x
    return to.cache.index_copy_(0, to.slots, x.flatten(1).to(to.cache.dtype))


def _rounded(
    x: Tensor, block: int, least: float, scale_of: Callable[[Tensor], Tensor], stored: Callable[[Tensor], Tensor]
) -> Tensor:
    """x [..., W] in blocks, each divided by the scale of its maximum, `stored`, and multiplied again."""
    if x.shape[-1] % block:
        return x
    blocks = x.float().unflatten(-1, (-1, block))
    scale = scale_of(blocks.abs().amax(-1, keepdim=True).clamp_min(least))
    return (stored(blocks / scale) * scale).flatten(-2).to(x.dtype)


def _to_e4m3(x: Tensor) -> Tensor:
    """The nearest numbers of e4m3; larger ones are its largest."""
    return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).float()


def _to_e2m1(x: Tensor) -> Tensor:
    """The nearest numbers of e2m1, of two the one with an even code."""
    size = x.abs().clamp(max=_E2M1_MAX)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign((size / step).round() * step, x)
