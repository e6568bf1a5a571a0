"""Norms that read attention over blocks of the residual (Kimi K3), in the place of `RMSNorm`.

Legend: T tokens, D hidden, N rows of a token in the residual of `kernels.ops.residual_blocks`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.ops.protocol import Ops
from moe_engine.kernels.ops.residual_blocks import BlockWeights, mix_blocks
from moe_engine.kernels.quantization.protocol import ActivationFormat
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.norm import RMSNorm, summed
from moe_engine.models.layers.residual.residual_norm import ResidualNorm
from moe_engine.models.tensors.model import layer_index
from moe_engine.models.weights import WeightSource

_PARTS = {"input_layernorm": "self_attention_res", "post_attention_layernorm": "mlp_res", "norm": "output_attn_res"}
"""Norms, and the weights of the sums that they norm."""


def spread_blocks(x: Tensor, config: ModelConfig) -> Tensor:
    """x [T, D] -> a residual whose first row is x."""
    residual = x.new_zeros(len(x), config.residual_rows * x.shape[1])
    residual[:, : x.shape[1]] = x
    return residual


def block_prefix(norm: str) -> str:
    """Prefix of the names of the weights that belong to a norm, by its prefix."""
    block, _, name = norm.rpartition(".")
    return f"{block}.{_PARTS[name]}"


class BlockNorm(ResidualNorm):
    """`RMSNorm` of the weighted sum of the residual's rows, after a result is added to the row of its block.

    Args:
        prefix: of the norm.
    """

    _norm: RMSNorm

    def __init__(self, ops: Ops, reader: WeightSource, prefix: str, config: ModelConfig) -> None:
        super().__init__(ops, reader, prefix, config)
        width, layer = config.hidden_size, layer_index(prefix)
        in_layer = prefix.endswith(".post_attention_layernorm")
        # the result that is added before comes from the same layer, or from the one before
        source = config.num_layers - 1 if layer < 0 else layer - 1 + in_layer
        self._row = 1 + source // config.residual_block
        starts = in_layer and layer % config.residual_block == 0
        self._score_norm = self._score = None
        if self._row:
            name = block_prefix(prefix)
            self._score_norm = reader.tensor(f"{name}_norm.weight", (width,), dtype=torch.float32)
            self._score = reader.tensor(f"{name}_proj.weight", (1, width), dtype=torch.float32)
        self._weights: BlockWeights | None = None
        if self._score_norm is not None and self._score is not None:
            self._weights = BlockWeights(self._score_norm, self._score[0], config.norm_eps, self._row, starts)
        self._mix = ops.capabilities.mix_blocks or mix_blocks
        self._rows = False

    def feed(self, *readers: ActivationFormat) -> None:
        """See `RMSNorm`. Results with scales come from a launch of their own."""
        super().feed(*readers)
        self._rows = any(reader.rows for reader in readers)

    def __call__(self, residual: Tensor) -> Any:
        """The norm of the sum of a new residual's rows."""
        return self._read(None, residual)

    def add(self, x: Tensor, residual: Tensor, other: Tensor | None = None) -> Any:
        """Adds x [T, D] to the row of its block, in place; then as `__call__`."""
        assert other is None
        x = summed(self._all_reduce, x, residual)
        return self._read(x, residual)

    def stream(self, residual: Tensor) -> Tensor:
        """The sum [T, D] that the last call has read, before its norm."""
        first = residual[:, : self.width]
        if self._weights is None or not len(residual):
            return first
        return self._mix(None, residual, self._weights, None)

    def _read(self, x: Tensor | None, residual: Tensor) -> Any:
        if not len(residual):  # an idle attention group, whose x has any width
            return self._norm(residual[:, : self.width])
        if self._weights is None:
            return self._norm(residual[:, : self.width])
        if self._rows:
            return self._norm(self._mix(x, residual, self._weights, None))
        return self._mix(x, residual, self._weights, self._norm.weight)
