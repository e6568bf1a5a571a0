"""The mixture-of-experts part: route, run the chosen experts, add the shared ones.

Legend: T tokens, D hidden, E experts, K experts per token, I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.experts.protocol import ExpertsKernel, ExpertWeights
from moe_engine.kernels.ops.protocol import RouterSpec
from moe_engine.models.config import ModelConfig, MoEConfig
from moe_engine.models.layers.mlp import MLP
from moe_engine.models.load_threads import for_each
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.dispatch.protocol import Phase
from moe_engine.parallel.experts import make_routed_experts
from moe_engine.parallel.share import WHOLE, Share
from moe_engine.parallel.token_moves import TokenLayout


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls the projections of an expert."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def router_spec(moe: MoEConfig) -> RouterSpec:
    """The router's part of the config, as the kernels take it."""
    return RouterSpec(
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        score=moe.score,
        has_bias=moe.has_bias,
        num_groups=moe.num_groups,
        topk_groups=moe.topk_groups,
        group_score=moe.group_score,
        renormalize=moe.renormalize,
        scale=moe.scale,
    )


class MoE:
    """x [T, D] -> sum_k w_k expert_k(x) + shared(x), [T, D]. Gate and bias stay in float32.

    On many ranks, where tokens travel, x is this rank's share and each rank holds whole experts, and the shared one
    whole. Else x is everybody's tokens, each rank holds some of the experts, cut by width, and a part of the shared
    one, and the result is its summand.
    """

    def __init__(
        self,
        config: ModelConfig,
        backends: Backends,
        reader: WeightSource,
        parallel: ParallelContext,
        prefix: str,
        names: ExpertNames | None = None,
    ) -> None:
        moe = config.moe
        assert moe is not None
        hidden, wide = config.hidden_size, torch.float32
        self._spec = router_spec(moe)
        self._gate = reader.tensor(f"{prefix}.gate.weight", (moe.num_experts, hidden), dtype=wide)  # [E, D]
        bias = f"{prefix}.gate.e_score_correction_bias"
        self._bias = reader.tensor(bias, (moe.num_experts,), dtype=wide) if moe.has_bias else None
        travels = parallel.dispatcher is not None
        self.tokens = TokenLayout.SHARE if travels else TokenLayout.ALL
        weights = load_experts(
            backends.experts, reader, f"{prefix}.experts", moe, hidden, names or ExpertNames(),
            Share.of(parallel.ep), Share.of(parallel.moe_tp),
        )  # fmt: skip
        self._routed = make_routed_experts(backends.experts, weights, parallel)
        share, shared = WHOLE if travels else Share.of(parallel.world), f"{prefix}.shared_experts"
        self._shared = None
        if moe.shared_width:
            self._shared = MLP(backends, reader, shared, hidden, moe.shared_width, share=share)
        self._route = backends.ops.route
        shared_weights = None if self._shared is None else self._shared.weights
        self._whole = self._routed.whole_layer(self._gate, self._bias, self._spec, shared_weights)

    @property
    def fused(self) -> Any | None:
        """What the kernel runs the whole layer with, where it does so in one call."""
        return None if self._whole is None else self._whole.args[0]

    def forward(self, x: Tensor, phase: Phase = "prefill") -> Tensor:
        if self._whole is not None:
            return self._whole(x)
        weights, ids = self._route(x, self._gate, self._bias, self._spec)  # [T, K]
        shared = None if self._shared is None else self._shared.forward(x)
        return self._routed.run(x, weights, ids, shared, phase)


def load_experts(
    kernel: ExpertsKernel,
    reader: WeightSource,
    prefix: str,
    moe: MoEConfig,
    hidden: int,
    names: ExpertNames,
    experts: Share = WHOLE,
    part: Share = WHOLE,
) -> ExpertWeights:
    """Fills this rank's `part` of its `experts`, each through one expert's worth of scratch memory (a thread)."""
    width, cut = part.width(moe.width), part.cut(moe.width)
    count = experts.width(moe.num_experts)
    first = experts.rank * count
    weights = kernel.allocate(count, hidden, width, reader.dtype, reader.device)

    def scratch() -> tuple[Tensor, Tensor, Tensor]:
        flat = torch.empty(3, width * hidden, dtype=reader.dtype, device=reader.device)
        return flat[0].view(width, hidden), flat[1].view(width, hidden), flat[2].view(hidden, width)

    def load(index: int, parts: tuple[Tensor, Tensor, Tensor]) -> None:
        expert = f"{prefix}.{first + index}"
        for name, out in zip((names.gate, names.up), parts):
            reader.linear(f"{expert}.{name}", (moe.width, hidden), rows=cut, out=out)
        reader.linear(f"{expert}.{names.down}", (hidden, moe.width), cols=cut, out=parts[2])
        kernel.load_expert(weights, index, *parts)

    for_each(count, scratch, load)
    for expert in (*range(first), *range(first + count, moe.num_experts)):
        for name in (names.gate, names.up, names.down):
            reader.skip(f"{prefix}.{expert}.{name}.weight")
    return weights
