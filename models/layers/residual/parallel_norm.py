"""The input of a feed-forward that reads what its layer's attention reads (Cohere 2), in the place of the norm after
attention.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_engine.kernels.ops.protocol import Ops
from moe_engine.kernels.quantization.protocol import ActivationFormat
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.norm import RMSNorm, summed
from moe_engine.models.layers.residual.residual_norm import ResidualNorm
from moe_engine.models.weights import WeightSource


class ParallelNorm(ResidualNorm):
    """norm: of the layer's input. It is computed twice: on several ranks attention and feed-forward read the rows of
    different tokens. Its results are tensors, which consumers quantize themselves."""

    _norm: RMSNorm

    def __init__(self, ops: Ops, reader: WeightSource, norm: RMSNorm, config: ModelConfig) -> None:
        super().__init__(ops, reader, "", config)
        self._norm = norm

    def feed(self, *readers: ActivationFormat) -> None:
        """Nothing: results are tensors."""

    def add(self, x: Tensor, residual: Tensor, other: Tensor | None = None) -> Any:
        """The norm of the residual [T, D]; then residual += x, in place."""
        assert other is None
        hidden = self._norm(residual)
        residual.add_(summed(self._all_reduce, x, residual))
        return hidden
