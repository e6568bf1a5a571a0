"""Matrix products with weights. `prepare` once at load (packing, dequantization, vendor layouts), `run` each step.

Legend: T tokens, K in-features, N out-features, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from moe_engine.kernels.quantization.codes import Coded
from moe_engine.kernels.quantization.protocol import ActivationFormat, KernelFormat, QuantizedActivation
from moe_engine.kernels.vendors.warming import StepShapes

MLPCall = Callable[[Any], Tensor]
"""x [T, K], in the `input_format` of gate and up -> down(silu(gate(x)) * up(x)) [T, N]."""


@dataclass(frozen=True)
class PreparedLinear:
    """A weight in its kernel's layout. `data` is private to the kernel; `num_bytes` is its memory."""

    in_features: int
    out_features: int
    data: Any
    bias: Tensor | None
    num_bytes: int
    adds_bias_apart: bool = False
    """`run` adds the bias in a launch of its own."""
    memory: Tensor | None = None
    """The memory that a product reads first, contiguous; None: not known."""
    following: tuple[Tensor, ...] = ()
    """Of heads: memory, at most two tensors, that is read by the next launches. The product may bring it to a cache."""


@dataclass(frozen=True)
class LinearCapabilities:
    """The optional parts of a linear kernel; None: not supported."""

    quantized: Mapping[type[KernelFormat], Callable[[Any, Tensor | None], PreparedLinear]] = field(default_factory=dict)
    """Formats that are multiplied without dequantization, each with its `prepare`: a `QuantizedWeight` [N, K] of that
    format, bias [N] in the activation dtype, or None. May keep or drop the weight."""

    warm_up: Callable[[StepShapes], int] | None = None
    """Runs everything that the kernel compiles at first use, see `vendors.warming`; returns the number of products
    run."""

    heads_quantized: Callable[[Tensor, PreparedLinear, ActivationFormat], QuantizedActivation] | None = None
    """`run_heads` of x [T, H, K] as quantized rows [T, H N] in the consumer's format; N is a multiple of 128."""

    coded_heads: Callable[[Coded, int], PreparedLinear] | None = None
    """`prepare_heads` of a weight [H N, K] of that many heads, in codes."""

    takes: Callable[[Any], bool] | None = None
    """(format): whether a format of a class in `quantized` is supported; None: every format of the class is."""

    norms: Callable[[Tensor, PreparedLinear], bool] | None = None
    """(x [T, K], weight): whether `run` takes these rows as `RowsToNorm`."""

    quantizes_heads: Callable[[int, PreparedLinear, PreparedLinear], bool] | None = None
    """(tokens, weight of wide heads, weight of the consumer): whether `heads_quantized` is worth more than `run_heads`
    and a consumer that quantizes; needs `heads_quantized`. None: never."""

    into: Callable[[Tensor, PreparedLinear, Tensor], Tensor] | None = None
    """(x [T, K], weight, out): `run` of an unquantized weight, written to `out` [T, N], contiguous; returns it."""


class LinearKernel(Protocol):
    name: str

    @property
    def capabilities(self) -> LinearCapabilities: ...

    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> PreparedLinear:
        """weight [N, K] in the activation dtype (already dequantized), bias [N]. May keep or drop `weight`."""

    def input_format(self, weight: PreparedLinear) -> ActivationFormat:
        """Format in which products with this weight read x. If it has rows, `run` and the calls of `fuse_mlp` also
        accept quantized activations, and quantize others themselves."""

    def run(self, x: Tensor, weight: PreparedLinear) -> Tensor:
        """x [T, K] (rows may be strided) -> x @ weight.T + bias, [T, N] contiguous, accumulated in float32."""

    def fuse_mlp(self, gate_up: PreparedLinear, down: PreparedLinear, limit: float = 0.0) -> MLPCall | None:
        """A gated MLP in one call; gate_up holds the gate's rows first. limit: that of `Ops.silu_and_mul`. None if
        these weights or a limit are not supported."""

    def prepare_heads(self, weight: Tensor) -> PreparedLinear:
        """weight [H, N, K]: one small matrix per head (MLA's absorbed products)."""

    def run_heads(self, x: Tensor, weight: PreparedLinear, out: Tensor | None = None) -> Tensor:
        """x [T, H, K] (strided view allowed) -> [T, H, N]: out[t, h] = weight[h] @ x[t, h].

        `out` may be a strided view [T, H, N] to write into (for instance the latent part of a [T, H, C+R] query).
        """
