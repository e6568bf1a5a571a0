"""Norms of the residual that also norm what is added to it (Trinity), in the place of `RMSNorm`.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_engine.kernels.ops.protocol import Ops
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.norm import RMSNorm, summed
from moe_engine.models.layers.residual_norm import ResidualNorm
from moe_engine.models.tensors import layer_index
from moe_engine.models.weights import WeightSource

_OF_ATTENTION = "post_attention_layernorm"
"""The norm of attention's result, and `Decoder`'s name of the norm of the sum after it."""


def norm_names(prefix: str, num_layers: int) -> tuple[str, str]:
    """Prefixes of the norm of a result and of the norm of the residual, by `Decoder`'s prefix. The first one is empty
    in front of the first layer, where nothing is added."""
    if prefix.endswith(_OF_ATTENTION):
        return prefix, prefix.replace(_OF_ATTENTION, "pre_mlp_layernorm")
    layer = num_layers if prefix == "model.norm" else layer_index(prefix)
    return f"model.layers.{layer - 1}.post_mlp_layernorm" if layer else "", prefix


class ResultNorm(ResidualNorm):
    """The norm of the residual, after the norm of a result is added to it.

    Args:
        names: of `norm_names`.
    """

    def __init__(self, ops: Ops, reader: WeightSource, names: tuple[str, str], config: ModelConfig) -> None:
        super().__init__(ops, reader, names[1], config)
        self._of_result = RMSNorm(ops, reader, names[0], config.hidden_size, config.norm_eps)

    def __call__(self, residual: Tensor) -> Any:
        """residual [T, D] -> its norm."""
        return self._norm(residual)

    def add(self, x: Tensor, residual: Tensor, other: Tensor | None = None) -> Any:
        """residual [T, D] += the norm of x, in place; then as `__call__`."""
        assert other is None
        x = summed(self._all_reduce, x, residual)
        return self._norm.add(self._of_result(x), residual)

    def stream(self, residual: Tensor) -> Tensor:
        """See `RMSNorm`."""
        return residual
