"""Shared experts with a factor: sigmoid(x . gate) of each token (Qwen3-Next), or one number (Cohere 2).

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.quantization.protocol import (
    UNQUANTIZED,
    Activation,
    ActivationFormat,
    as_format,
    common_format,
    unquantized,
)
from moe_engine.models.batch import RoutedTokens
from moe_engine.models.layers.feed_forward.mlp import MLP
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.dispatch.protocol import Phase


class ScaledMLP(MLP):
    """x [T, D] -> factor * mlp(x), [T, D]. Arguments as of `MLP`."""

    def __init__(
        self, backends: Backends, reader: WeightSource, prefix: str, hidden: int, width: int, factor: float, **more: Any
    ) -> None:
        super().__init__(backends, reader, prefix, hidden, width, **more)
        self._factor = factor

    def forward(self, x: Activation, phase: Phase = "prefill", tokens: RoutedTokens | None = None) -> Tensor:
        return super().forward(x, phase, tokens).mul_(self._factor)


class GatedMLP(MLP):
    """x [T, D] -> sigmoid(x . gate) * mlp(x), [T, D]. Arguments as of `MLP`; gate: name of the gate's tensor [1, D]."""

    def __init__(
        self, backends: Backends, reader: WeightSource, prefix: str, hidden: int, width: int, gate: str, **more: Any
    ) -> None:
        super().__init__(backends, reader, prefix, hidden, width, **more)
        self._inner_format = self.input_format
        self._gates = backends.ops.capabilities.gates
        self._gate = reader.tensor(gate, (1, hidden), dtype=torch.float32).to(reader.dtype)
        self.input_format: ActivationFormat = common_format(UNQUANTIZED, self._inner_format)

    def forward(self, x: Activation, phase: Phase = "prefill", tokens: RoutedTokens | None = None) -> Tensor:
        out = super().forward(as_format(x, self._inner_format), phase, tokens)
        if self._gates is not None:
            return self._gates.rows(out, unquantized(x), self._gate)
        return out.mul_(functional.linear(unquantized(x), self._gate).sigmoid_())
