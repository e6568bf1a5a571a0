"""Routed experts in a space of fewer channels (Kimi K3): up(norm(sum_k w_k expert_k(down(x)))).

Legend: T tokens, D hidden, L latent, K experts per token.
"""

from __future__ import annotations

from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.quantization.protocol import Activation, as_format, unquantized
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.dispatch.protocol import Phase
from moe_engine.parallel.experts import RoutedExperts
from moe_engine.parallel.share import WHOLE, Share
from moe_engine.parallel.uneven import sum_over


class LatentExperts:
    """`RoutedExperts` on x [T, D], around the experts `routed` of width L.

    Without a dispatcher the ranks' partial sums are summed in the latent space, because the norm reads the whole sum;
    each rank then multiplies its part of the channels, so that the result is a partial sum again.

    Args:
        prefix: of the MoE block.
    """

    def __init__(
        self, config: ModelConfig, prefix: str, routed: RoutedExperts, backends: Backends, reader: WeightSource,
        parallel: ParallelContext,
    ) -> None:  # fmt: skip
        assert config.moe is not None
        hidden, latent, linear = config.hidden_size, config.moe.latent, backends.linear
        self.routed = routed
        travels = parallel.dispatcher is not None
        share = WHOLE if travels else Share.of(parallel.world)
        self._sums = None if share.size == 1 else parallel.world
        self._part = share.cut(latent)
        self._down = load_linear(linear, reader, [f"{prefix}.routed_expert_down_proj"], [latent], hidden)
        self._up = load_linear(linear, reader, [f"{prefix}.routed_expert_up_proj"], [hidden], latent, in_share=share)
        self._norm: RMSNorm | None = None
        if config.moe.latent_norm:
            self._norm = RMSNorm(backends.ops, reader, f"{prefix}.routed_expert_norm", latent, config.norm_eps)
            if self._sums is None:
                self._norm.feed(self._up.input_format)
        self.input_format = self._down.input_format

    def run(
        self, x: Activation, topk_weights: Tensor, topk_ids: Tensor, add: Tensor | None = None, phase: Phase = "prefill"
    ) -> Tensor:
        inner = as_format(self._down(x), self.routed.input_format)
        mixed: Activation = self.routed.run(inner, topk_weights, topk_ids, phase=phase)
        if self._sums is not None:
            mixed = sum_over(self._sums, unquantized(mixed))
        if self._norm is not None:
            mixed = self._norm(unquantized(mixed))
        if self._sums is not None:
            mixed = unquantized(mixed)[:, self._part].contiguous()
        out = self._up(mixed)
        return out if add is None else out.add_(add)
