"""LayerNorm of a residual, with the addition before it (Phi-3.5-MoE, Cohere 2), in torch.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn.functional import layer_norm


class AddLayerNorm(Protocol):
    def __call__(self, x: Tensor | None, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """residual [T, D] += x in place, contiguous (None: nothing is added); returns (residual - mean) *
        rsqrt(variance + eps) * weight + bias (None: 0), in float32, rounded once. weight and bias [D] float32."""


def add_layer_norm(x: Tensor | None, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`AddLayerNorm`."""
    if x is not None:
        residual.add_(x)
    return layer_norm(residual.float(), weight.shape, weight, bias, eps).to(residual.dtype)
