"""The weights of index heads.

Legend: T tokens, D hidden, Hi index heads, P parts.
"""

from __future__ import annotations

from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.quantization.protocol import Activation, unquantized
from moe_engine.models.layers.linear import Linear


class IndexGates:
    """hidden [T, D] -> the weights of index heads [T, Hi] float32, or [P, T, Hi] where the kernel sums them."""

    def __init__(self, backends: Backends, gates: Tensor) -> None:
        """gates: [Hi, D] float32, the scale of the scores included."""
        assert backends.indexer is not None
        self._parts = backends.indexer.gates
        self._gate = None if self._parts is None else backends.ops.prepare_gate(gates)
        self._linear = Linear(backends.linear, gates) if self._gate is None else None

    def __call__(self, hidden: Activation) -> Tensor:
        x = unquantized(hidden)
        if self._linear is not None:
            return self._linear(x.float())
        assert self._parts is not None and self._gate is not None
        return self._parts(x, self._gate)
