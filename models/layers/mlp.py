"""The dense feed-forward part: down(silu(gate(x)) * up(x)), gate and up in one product.

Legend: T tokens, D hidden, I width.
"""

from __future__ import annotations

from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.weights import WeightSource


class MLP:
    """x [T, D] -> [T, D]."""

    def __init__(
        self, backends: Backends, reader: WeightSource, prefix: str, hidden: int, width: int, bias: bool = False
    ) -> None:
        kernel = backends.linear
        gate_up = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self._gate_up = load_linear(kernel, reader, gate_up, [width, width], hidden, bias)
        self._down = load_linear(kernel, reader, [f"{prefix}.down_proj"], [hidden], width, bias)
        self._silu_and_mul = backends.ops.silu_and_mul

    def forward(self, x: Tensor) -> Tensor:
        return self._down(self._silu_and_mul(self._gate_up(x)))
