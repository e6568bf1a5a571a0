"""Norms of the residual that also norm what is added to it (Trinity, GLM-4; in some layers: A.X K1), or that norm only
what is added (OLMo 2).

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.ops.protocol import Ops
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.norm import RMSNorm, summed
from moe_engine.models.layers.residual.residual_norm import ResidualNorm
from moe_engine.models.tensors.model import LAYER_FACTOR, layer_index
from moe_engine.models.weights import WeightSource

_OF_ATTENTION = "post_attention_layernorm"
"""`Decoder`'s name of the norm after attention."""


def norm_names(prefix: str, config: ModelConfig) -> tuple[str, str, str]:
    """Prefixes of the norm of a result and of the norm of the residual, by `Decoder`'s prefix, and of the residual's
    factor. The first one is empty in front of the first layer, where nothing is added, and where results are added as
    they are, the second one where the next part reads the residual, the third one without a factor."""
    own, layer = config.result_norms, layer_index(prefix)
    assert own is not None
    if prefix.endswith(_OF_ATTENTION):
        names = own.of_attention, own.before_feed_forward
        result, residual = (f"model.layers.{layer}.{name}" if name else "" for name in names)
        return result, residual, ""
    before = config.num_layers - 1 if layer < 0 else layer - 1
    normed = before >= 0 and config.norms_result(before)
    result = f"model.layers.{before}.{own.of_feed_forward}" if normed else ""
    factor = f"model.layers.{before}.{LAYER_FACTOR}" if before >= 0 and config.layer_factors else ""
    return result, prefix if own.before_attention or layer < 0 else "", factor


class ResultNorm(ResidualNorm):
    """The norm of the residual, after the norm of a result is added to it; without a norm of the residual the residual.

    Args:
        names: of `norm_names`.
    """

    def __init__(self, ops: Ops, reader: WeightSource, names: tuple[str, str, str], config: ModelConfig) -> None:
        result, own, factor = names
        self._of_result = (
            RMSNorm(ops, reader, result, config.hidden_size, config.norm_eps, config.norm_plus) if result else None
        )
        super().__init__(ops, reader, own, config, config.norm_plus)
        self._factor = reader.tensor(f"{factor}.weight", (1,), dtype=torch.float32) if factor else None

    def __call__(self, residual: Tensor) -> Any:
        """residual [T, D] -> its norm."""
        return residual if self._norm is None else self._norm(residual)

    def add(self, x: Tensor, residual: Tensor, other: Tensor | None = None) -> Any:
        """residual [T, D] += the norm of x, in place; then as `__call__`."""
        assert other is None and self._of_result is not None
        normed = self._of_result(summed(self._all_reduce, x, residual))
        if self._factor is not None:
            return self(residual.add_(normed).mul_(self._factor))
        return residual.add_(normed) if self._norm is None else self._norm.add(normed, residual)
