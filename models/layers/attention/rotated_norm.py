"""Norms of q and k after the rotation (Hunyuan; Llama 4: without weights), by the kernels of norms before it.

A rotation keeps the mean square of a head, so that a norm without weights may come first. Attention needs the products
of q and k only: the weights of both multiply the rotated q, and the cache has keys without weights.

Legend: T tokens, H query heads, Dh head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.ops.protocol import HeadNorms, Ops
from moe_engine.models.tensors.gqa import ROTATED_NORMS
from moe_engine.models.weights import WeightSource


class HeadWeights:
    """The weights of both norms, [Dh] float32 each. prefix: of the attention's tensors."""

    def __init__(self, reader: WeightSource, prefix: str, width: int) -> None:
        self._query, self._key = (
            reader.tensor(f"{prefix}.{name}.weight", (width,), dtype=torch.float32) for name in ROTATED_NORMS
        )

    def multiply(self, q: Tensor) -> Tensor:
        """Rotated q [T, H, Dh], in place."""
        return q.mul_(self._query * self._key)


class UnweightedNorm:
    """x [T, H, Dh] * rsqrt(mean(x^2) + eps), instead of a head's `RMSNorm`."""

    def __init__(self, ops: Ops, width: int, eps: float, device: torch.device) -> None:
        ones = torch.ones(width, device=device)
        self._ops, self._norms = ops, HeadNorms(ones, ones, eps)  # not a weight of the model, see `footprint`

    @property
    def weight(self) -> Tensor:
        return self._norms.q

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self._norms.q, self._norms.eps)
