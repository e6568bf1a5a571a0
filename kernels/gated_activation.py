"""The gated activations of MLPs and experts in torch (`Ops.silu_and_mul`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def activate(gate: Tensor, up: Tensor, limit: float = 0.0, alpha: float = 0.0) -> Tensor:
    """The activation of gate and up, of one shape, with the limit and alpha of `Ops.silu_and_mul`."""
    if limit < 0:
        return F.silu(gate).clamp_(max=-limit).mul_(up.clamp(limit, -limit))
    if limit:
        gate, up = clamped(gate, up, limit)
    return (gate * torch.sigmoid(alpha * gate)).mul_(up + 1) if alpha else F.silu(gate).mul_(up)


def clamped(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """gate at most `limit`, up within +-limit."""
    return gate.clamp(max=limit), up.clamp(-limit, limit)
