"""The common part of norms that take the place of `RMSNorm` in layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from moe_engine.kernels.ops.protocol import Ops
from moe_engine.kernels.quantization.protocol import ActivationFormat
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.weights import WeightSource

if TYPE_CHECKING:
    from moe_engine.parallel.all_reduce.custom import CustomAllReduce


class ResidualNorm:
    """Replaces `RMSNorm` in layers; a subclass has `__call__` and `add`.

    Args:
        norm: prefix of the norm of the residual, or "" without one.
        plus: as of `RMSNorm`.
    """

    fuses_router = adds_pairs = adds_rows = False

    def __init__(self, ops: Ops, reader: WeightSource, norm: str, config: ModelConfig, plus: float = 0.0) -> None:
        self.width = config.hidden_size
        """Channels of a result."""
        self._norm = RMSNorm(ops, reader, norm, self.width, config.norm_eps, plus) if norm else None
        self._all_reduce: CustomAllReduce | None = None

    def feed(self, *readers: ActivationFormat) -> None:
        """See `RMSNorm`. A residual without a norm is read unquantized."""
        if self._norm is not None:
            self._norm.feed(*readers)

    def keep_unquantized(self) -> None:
        """See `RMSNorm`."""
        if self._norm is not None:
            self._norm.keep_unquantized()

    def stream(self, residual: Tensor) -> Tensor:
        """See `RMSNorm`: all rows, which `HiddenTaps` reduces to one."""
        return residual

    def sum_over(self, all_reduce: CustomAllReduce) -> None:
        """From now on `add` gets partial sums of the ranks' rows."""
        self._all_reduce = all_reduce
