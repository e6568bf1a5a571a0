"""Scales that are powers of two, as float32 and as e8m0."""

from __future__ import annotations

import torch
from torch import Tensor


def power_of_two_above(scales: Tensor) -> Tensor:
    """The smallest powers of two >= the scales, which are positive."""
    mantissa, exponent = torch.frexp(scales)  # scale = mantissa * 2^exponent, mantissa in [1/2, 1)
    return torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
