"""Experts beside an MLP, each with norms of input and result (Gemma 4): norm(mlp(norm(x))) + norm(experts(norm(x))).

Legend: T tokens, D hidden, K experts per token, E experts.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, Activation, as_format, unquantized
from moe_engine.models.batch import RoutedTokens
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.feed_forward.moe import Choice, MoE
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.layers.overlap_stages import Stages
from moe_engine.models.tensors.gqa import EXPERT_SCALES, INNER_NORMS, MLP_NORM, ROUTER_NORM
from moe_engine.models.tensors.model import expert_names
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.dispatch.protocol import Phase
from moe_engine.parallel.share import Share
from moe_engine.parallel.uneven import sum_over


class NormedMoE(MoE):
    """x [T, D], the residual -> [T, D]. The MLP is the shared expert. The router has a norm, too, and its weights are
    multiplied by a factor of each expert.

    Where results are partial sums, both are summed for their norms, and a rank's part of the result is some of its
    channels.
    """

    leaves_rows = is_plain = False
    input_format = UNQUANTIZED

    def __init__(
        self, config: ModelConfig, layer_index: int, backends: Backends, reader: WeightSource, parallel: ParallelContext
    ) -> None:
        super().__init__(config, layer_index, backends, reader, parallel)
        assert self._shared is not None
        layer, hidden = f"model.layers.{layer_index}", config.hidden_size
        prefix = f"{layer}.{expert_names(config).block}"
        norm = partial(RMSNorm, backends.ops, reader, width=hidden, eps=config.norm_eps)
        self._router_norm = norm(prefix=f"{prefix}.{ROUTER_NORM}", factor=hidden**-0.5)
        norms = [norm(prefix=f"{layer}.{MLP_NORM}"), *(norm(prefix=f"{prefix}.{name}") for name in INNER_NORMS)]
        self._before_shared, self._of_shared, self._before_routed, self._of_routed = norms
        self._before_shared.feed(self._shared.input_format)
        self._before_routed.feed(self._routed.input_format)
        self._scales = reader.tensor(f"{prefix}.{EXPERT_SCALES}", (len(self._gate),), dtype=torch.float32)  # [E]
        share = Share.of(parallel.world)
        self._sums = None if parallel.dispatcher is not None or share.size == 1 else parallel.world
        self._part = share.cut(hidden)

    def forward(
        self, x: Activation, phase: Phase = "prefill", tokens: RoutedTokens | None = None, chosen: Choice | None = None
    ) -> Tensor:
        assert chosen is None and self._shared is not None
        x = unquantized(x)
        weights, ids = self._choose(self._router_norm(x), tokens, phase)
        inner = as_format(self._before_routed(x), self._routed.input_format)
        routed = self._routed.run(inner, weights, ids, phase=phase)
        shared = self._shared.forward(self._before_shared(x))
        if self._sums is None:
            return self._of_shared(shared).add_(self._of_routed(routed))  # type: ignore[no-any-return]
        both = sum_over(self._sums, torch.cat((shared, routed), 1))
        shared, routed = both.chunk(2, 1)
        out = torch.zeros_like(x)
        whole = self._of_shared(shared).add_(self._of_routed(routed))
        out[:, self._part] = whole[:, self._part]
        return out

    def stages(
        self, x: Activation, phase: Phase = "prefill", tokens: RoutedTokens | None = None, chosen: Choice | None = None
    ) -> Stages:
        yield from ()
        return self.forward(x, phase, tokens, chosen)

    def _in_slots(self, weights: Tensor, ids: Tensor, real: Tensor | None) -> Choice:
        return super()._in_slots(weights * self._scales[ids.clamp(min=0).long()], ids, real)
