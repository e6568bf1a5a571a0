"""Matrix products with weights. `prepare` once at load (packing, dequantization, vendor layouts), `run` each step.

Legend: T tokens, K in-features, N out-features, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat, BlockWeight


@dataclass(frozen=True)
class PreparedLinear:
    """A weight in its kernel's layout. `data` is private to the kernel; `num_bytes` is its memory."""

    in_features: int
    out_features: int
    data: Any
    bias: Tensor | None
    num_bytes: int


class LinearKernel(Protocol):
    name: str

    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> PreparedLinear:
        """weight [N, K] in the activation dtype (already dequantized), bias [N]. May keep or drop `weight`."""

    def run(self, x: Tensor, weight: PreparedLinear) -> Tensor:
        """x [T, K] (rows may be strided) -> x @ weight.T + bias, [T, N] contiguous, accumulated in float32."""

    def prepare_heads(self, weight: Tensor) -> PreparedLinear:
        """weight [H, N, K]: one small matrix per head (MLA's absorbed products)."""

    def run_heads(self, x: Tensor, weight: PreparedLinear, out: Tensor | None = None) -> Tensor:
        """x [T, H, K] (strided view allowed) -> [T, H, N]: out[t, h] = weight[h] @ x[t, h].

        `out` may be a strided view [T, H, N] to write into (for instance the latent part of a [T, H, C+R] query).
        """


@runtime_checkable
class BlockScaledLinear(Protocol):
    """A linear kernel that keeps block-FP8 weights as the checkpoint stores them.

    Activations are quantized here or by their producer: if `input_format` has `rows`, `run` (and `run_mlp` of a
    `FusedMLP`) accept quantized and unquantized activations.
    """

    def prepare_blocks(self, weight: BlockWeight, bias: Tensor | None = None) -> PreparedLinear:
        """weight [N, K] in blocks of 128 x 128, bias [N] in the activation dtype. May keep or drop `weight`."""

    def input_format(self, weight: PreparedLinear) -> ActivationFormat:
        """Format in which products with this weight read x."""

    def run(self, x: Activation, weight: PreparedLinear) -> Tensor:
        """See `LinearKernel.run`."""


@runtime_checkable
class FusedMLP(Protocol):
    """A linear kernel that also runs a gated MLP in one call."""

    def fuses_mlp(self, gate_up: PreparedLinear, down: PreparedLinear) -> bool:
        """True if `run_mlp` supports these two weights."""

    def run_mlp(self, x: Tensor, gate_up: PreparedLinear, down: PreparedLinear) -> Tensor:
        """x [T, K] -> down(silu(gate(x)) * up(x)) [T, N]; gate_up holds the gate's rows first."""
