"""Rounding of vectors to the numbers of formats with a scale for each block of channels, without storing them.

DeepSeek V4.1 is trained with caches in these formats: the values that they can hold are a part of the model. Widths
that have no whole blocks are not rounded, as in the reference.

Source: DeepSeek V4.1's release, `inference/kernel.py`, as transformers describes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_LEAST_E4M3, _LEAST_E2M1, _LEAST_SCALE = 1e-4, _E2M1_MAX * 2.0**-126, _E2M1_MAX * 2.0**-9
"""The least maximum of a block: for e4m3, for e2m1 with a power of two, and with a scale in e4m3."""
BLOCK, SMALL_BLOCK = 32, 16


def round_e4m3(x: Tensor) -> Tensor:
    """x [..., W] in e4m3, blocks of 32 with a power of two as scale -> x's dtype."""
    if x.shape[-1] % BLOCK:
        return x
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    most = blocks.abs().amax(-1, keepdim=True).clamp_min(_LEAST_E4M3)
    scale = _power_above(most * (1.0 / _E4M3_MAX))
    values = (blocks / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).float()
    return (values * scale).flatten(-2).to(x.dtype)


def round_e2m1(x: Tensor) -> Tensor:
    """x [..., W] in e2m1, blocks of 32 with a power of two as scale -> x's dtype."""
    if x.shape[-1] % BLOCK:
        return x
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    most = blocks.abs().amax(-1, keepdim=True).clamp_min(_LEAST_E2M1)
    scale = _power_above(most * (1.0 / _E2M1_MAX))
    return (_to_e2m1(blocks / scale) * scale).flatten(-2).to(x.dtype)


def round_e2m1_small(x: Tensor) -> Tensor:
    """x [..., W] in e2m1, blocks of 16 with a scale in e4m3 -> x's dtype."""
    if x.shape[-1] % SMALL_BLOCK:
        return x
    blocks = x.float().unflatten(-1, (-1, SMALL_BLOCK))
    most = blocks.abs().amax(-1, keepdim=True).clamp_min(_LEAST_SCALE)
    scale = (most / _E2M1_MAX).to(torch.float8_e4m3fn).float()
    return (_to_e2m1(blocks / scale) * scale).flatten(-2).to(x.dtype)


def _power_above(x: Tensor) -> Tensor:
    """The least power of two that is not less than x > 0."""
    fraction, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (fraction == 0.5).int())


def _to_e2m1(x: Tensor) -> Tensor:
    """The nearest numbers of e2m1, of two the one with an even code."""
    size = x.abs().clamp(max=_E2M1_MAX)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign((size / step).round() * step, x)
