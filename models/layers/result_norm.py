"""Norms of the residual that also norm what is added to it (Trinity, GLM-4), or that norm only what is added (OLMo 2).

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_engine.kernels.ops.protocol import Ops
from moe_engine.kernels.quantization.protocol import ActivationFormat
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.norm import RMSNorm, summed
from moe_engine.models.tensors import LAYER_FACTOR, layer_index
from moe_engine.models.weights import WeightSource

if TYPE_CHECKING:
    from moe_engine.parallel.all_reduce.custom import CustomAllReduce

_OF_ATTENTION = "post_attention_layernorm"
"""`Decoder`'s name of the norm after attention."""


def norm_names(prefix: str, config: ModelConfig) -> tuple[str, str, str]:
    """Prefixes of the norm of a result and of the norm of the residual, by `Decoder`'s prefix, and of the residual's
    factor. The first one is empty in front of the first layer, where nothing is added, the second one where the next
    part reads the residual, the third one without a factor."""
    own, layer = config.result_norms, layer_index(prefix)
    assert own is not None
    if prefix.endswith(_OF_ATTENTION):
        names = own.of_attention, own.before_feed_forward
        return f"model.layers.{layer}.{names[0]}", f"model.layers.{layer}.{names[1]}" if names[1] else "", ""
    before = config.num_layers - 1 if layer < 0 else layer - 1
    result = f"model.layers.{before}.{own.of_feed_forward}" if before >= 0 else ""
    factor = f"model.layers.{before}.{LAYER_FACTOR}" if before >= 0 and config.layer_factors else ""
    return result, prefix if own.before_attention or layer < 0 else "", factor


class ResultNorm:
    """The norm of the residual, after the norm of a result is added to it; without a norm of the residual the residual.

    Args:
        names: of `norm_names`.
    """

    fuses_router = adds_pairs = adds_rows = False

    def __init__(self, ops: Ops, reader: WeightSource, names: tuple[str, str, str], config: ModelConfig) -> None:
        made = (
            RMSNorm(ops, reader, name, config.hidden_size, config.norm_eps, config.norm_plus) if name else None
            for name in names[:2]
        )  # fmt: skip
        self._of_result, self._norm = made
        self._factor = reader.tensor(f"{names[2]}.weight", (1,), dtype=torch.float32) if names[2] else None
        self.width = config.hidden_size
        self._all_reduce: CustomAllReduce | None = None

    def feed(self, *readers: ActivationFormat) -> None:
        """See `RMSNorm`. The residual is read unquantized."""
        if self._norm is not None:
            self._norm.feed(*readers)

    def keep_unquantized(self) -> None:
        """See `RMSNorm`."""
        if self._norm is not None:
            self._norm.keep_unquantized()

    def sum_over(self, all_reduce: CustomAllReduce) -> None:
        """From now on `add` gets partial sums of the ranks' rows."""
        self._all_reduce = all_reduce

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

    def stream(self, residual: Tensor) -> Tensor:
        """See `RMSNorm`."""
        return residual
