"""Norms whose results are also the residual (MiniMax-Text-01), in the place of `RMSNorm`.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.ops.protocol import Ops
from moe_engine.kernels.quantization.protocol import ActivationFormat
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.norm import RMSNorm, summed
from moe_engine.models.layers.residual.residual_norm import ResidualNorm
from moe_engine.models.tensors.model import layer_index
from moe_engine.models.weights import WeightSource


class PostNorm(ResidualNorm):
    """The norm of the residual, which it then replaces, times the alpha of the part that follows: what this part's
    result, times its beta, is added to."""

    _norm: RMSNorm

    def __init__(self, ops: Ops, reader: WeightSource, prefix: str, config: ModelConfig) -> None:
        super().__init__(ops, reader, prefix, config)
        layer, scales = layer_index(prefix), config.residual_scales
        assert scales is not None
        before, after = scales.experts, (1.0, 1.0)
        if layer >= 0:
            after = scales.state if layer in config.state_layers else scales.attention
        if "post_attention" in prefix:
            before, after = after, scales.experts
        self._beta, self._alpha = before[1], after[0]

    def feed(self, *readers: ActivationFormat) -> None:
        """Nothing: the result is read unquantized."""

    def __call__(self, residual: Tensor) -> Any:
        """residual [T, D] -> its norm."""
        return self._kept(self._norm(residual), residual)

    def add(self, x: Tensor, residual: Tensor, other: Tensor | None = None) -> Any:
        """residual [T, D] += beta x, in place; then as `__call__`."""
        assert other is None
        x = summed(self._all_reduce, x, residual)
        return self._kept(self._norm.add(x if self._beta == 1.0 else x * self._beta, residual), residual)

    def _kept(self, normed: Tensor, residual: Tensor) -> Tensor:
        torch.mul(normed, self._alpha, out=residual)
        return normed
