"""RMSNorm, alone and fused with the residual stream. Weights are kept in float32.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.ops.protocol import Ops
from moe_engine.models.weights import WeightSource


class RMSNorm:
    """x * rsqrt(mean(x^2) + eps) * weight."""

    def __init__(self, ops: Ops, reader: WeightSource, prefix: str, width: int, eps: float) -> None:
        self.weight = reader.tensor(prefix + ".weight", (width,), dtype=torch.float32)
        self.eps = eps
        self._rms_norm = ops.rms_norm
        self._add_rms_norm = ops.add_rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        return self._rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual [T, D] += x in place; returns the norm of the sum."""
        return self._add_rms_norm(x, residual, self.weight, self.eps)
