"""The gated activations of MLPs and experts in torch (`Ops.silu_and_mul`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.kernels.gate_form import GELU_LIMIT, SILU, GatedActivation


def activate(gate: Tensor, up: Tensor, form: GatedActivation = SILU) -> Tensor:
    """The activation of gate and up, of one shape; of halves of up the row of both."""
    limit, alpha = form.limit, form.alpha
    if form.squared:
        return F.relu(torch.cat((gate, up), -1)).square_()
    if form.beta:
        return _situ(gate.float(), up.float(), form).to(gate.dtype)
    if limit == GELU_LIMIT:
        return F.gelu(gate, approximate="tanh").mul_(up)
    if limit < 0:
        return F.silu(gate).clamp_(max=-limit).mul_(up.clamp(limit, -limit))
    if limit:
        gate, up = clamped(gate, up, limit)
    return (gate * torch.sigmoid(alpha * gate)).mul_(up + 1) if alpha else F.silu(gate).mul_(up)


def _situ(gate: Tensor, up: Tensor, form: GatedActivation) -> Tensor:
    """SiTU of float32 gate and up."""
    active = torch.tanh(gate / form.beta).mul_(form.beta).mul_(gate.sigmoid())
    return active.mul_(torch.tanh(up / form.limit).mul_(form.limit) if form.limit else up)


def clamped(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """gate at most `limit`, up within +-limit."""
    return gate.clamp(max=limit), up.clamp(-limit, limit)
