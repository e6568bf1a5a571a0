"""Convolutions over the last tokens between two gates (LFM2), without their projections.

Legend: T tokens, W channels, K taps.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moe_engine.kernels.delta.protocol import StateRuns
from moe_engine.kernels.ops.state_tails import Tails


class GatedConv(Protocol):
    """The convolution of a step's tokens with its gates."""

    def __call__(self, projected: Tensor, taps: Tensor, kept: Tensor, runs: StateRuns) -> Tensor:
        """projected [T, 3 W], of each token the first gates, the second ones and the values, with any stride of tokens
        -> [T, W]: the second gate times the convolution of first gate times value. taps [K, W] float32; kept
        [rows, K - 1, W]: those products of the tokens before the step, of which the last are stored. Products and the
        sum of the taps, which is in float32, are rounded to projected's dtype."""


def gated_conv(projected: Tensor, taps: Tensor, kept: Tensor, runs: StateRuns) -> Tensor:
    """`GatedConv` in torch, for any device."""
    first, second, values = projected.chunk(3, 1)
    tails = Tails(first * values, kept, runs)
    mixed = torch.zeros(values.shape, device=values.device)
    for tap, weights in enumerate(taps):
        mixed.addcmul_(tails.before(len(taps) - 1 - tap).float(), weights)
    tails.store()
    return second * mixed.to(second.dtype)
