"""The dense feed-forward part: down(silu(gate(x)) * up(x)), or another activation; gate and up in one product, or up
alone.

Legend: T tokens, D hidden, I width.
"""

from __future__ import annotations

from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.gate_form import SILU, GatedActivation
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.quantization.protocol import Activation, as_format
from moe_engine.models.batch import RoutedTokens
from moe_engine.models.layers.attention.step_adapters import StepAdapters
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.dispatch.protocol import Phase
from moe_engine.parallel.dp_gather_scatter import TokenLayout
from moe_engine.parallel.share import WHOLE, Share


class MLP:
    """x [T, D] -> [T, D].

    Args:
        width: of the unsharded MLP.
        share: this rank's part of the width; the result is then a partial sum.
        tokens: input tokens.
        activation: of gate and up.
    """

    def __init__(
        self,
        backends: Backends,
        reader: WeightSource,
        prefix: str,
        hidden: int,
        width: int,
        bias: bool = False,
        share: Share = WHOLE,
        tokens: TokenLayout = TokenLayout.ALL,
        activation: GatedActivation = SILU,
    ) -> None:
        kernel = backends.linear
        self.tokens = tokens
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"][activation.squared :]
        both = len(names)
        self._gate_up = load_linear(kernel, reader, names, [width] * both, hidden, bias, [share] * both)
        self._down = load_linear(kernel, reader, [f"{prefix}.down_proj"], [hidden], width, bias, in_share=share)
        self._silu_and_mul, self.activation = backends.ops.silu_and_mul, activation
        self.input_format = self._gate_up.input_format
        """Activation format of x."""
        weights = self._gate_up.weight, self._down.weight
        self._fused = kernel.fuse_mlp(*weights, activation.limit) if activation.is_silu else None
        self.adapters: StepAdapters | None = None
        """LoRA adapters of the step; None without LoRA."""

    @property
    def weights(self) -> tuple[PreparedLinear, PreparedLinear]:
        """Gate and up [2I, D], or up alone without a gate, down [D, I]."""
        return self._gate_up.weight, self._down.weight

    @property
    def is_fused(self) -> bool:
        """True if the kernel runs it in one call."""
        return self._fused is not None

    @classmethod
    def dense(
        cls,
        backends: Backends,
        reader: WeightSource,
        parallel: ParallelContext,
        prefix: str,
        hidden: int,
        width: int,
        bias: bool = False,
        activation: GatedActivation = SILU,
    ) -> MLP:
        """The MLP of a dense layer: sharded over all ranks, or replicated, depending on the topology."""
        own = backends, reader, prefix, hidden, width, bias
        if parallel.topology.cuts_dense:
            return cls(*own, Share.of(parallel.world), activation=activation)
        return cls(*own, tokens=TokenLayout.SHARE, activation=activation)

    def forward(self, x: Activation, phase: Phase = "prefill", tokens: RoutedTokens | None = None) -> Tensor:
        if self._fused is not None and (self.adapters is None or not self.adapters.active):
            return self._fused(as_format(x, self.input_format))
        return self._down(self._silu_and_mul(self._gate_up(x), self.activation))
