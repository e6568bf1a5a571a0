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
from moe_engine.parallel.experts import make_routed_experts


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
    """x [T, D] -> sum_k w_k expert_k(x) + shared(x), [T, D]. Gate and bias stay in float32."""

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
        weights = load_experts(backends.experts, reader, f"{prefix}.experts", moe, hidden, names or ExpertNames())
        self._routed = make_routed_experts(backends.experts, weights)
        shared = f"{prefix}.shared_experts"
        self._shared = MLP(backends, reader, shared, hidden, moe.shared_width) if moe.shared_width else None
        self._route = backends.ops.route
        shared_weights = None if self._shared is None else self._shared.weights
        self._whole = self._routed.whole_layer(self._gate, self._bias, self._spec, shared_weights)

    @property
    def fused(self) -> Any | None:
        """What the kernel runs the whole layer with, where it does so in one call."""
        return None if self._whole is None else self._whole.args[0]

    def forward(self, x: Tensor) -> Tensor:
        if self._whole is not None:
            return self._whole(x)
        weights, ids = self._route(x, self._gate, self._bias, self._spec)  # [T, K]
        shared = None if self._shared is None else self._shared.forward(x)
        return self._routed.run(x, weights, ids, shared)


def load_experts(
    kernel: ExpertsKernel, reader: WeightSource, prefix: str, moe: MoEConfig, hidden: int, names: ExpertNames
) -> ExpertWeights:
    """Fills a layer's experts, each through one expert's worth of scratch memory (a thread)."""
    weights = kernel.allocate(moe.num_experts, hidden, moe.width, reader.dtype, reader.device)

    def scratch() -> tuple[Tensor, Tensor, Tensor]:
        flat = torch.empty(3, moe.width * hidden, dtype=reader.dtype, device=reader.device)
        return flat[0].view(moe.width, hidden), flat[1].view(moe.width, hidden), flat[2].view(hidden, moe.width)

    def load(expert: int, parts: tuple[Tensor, Tensor, Tensor]) -> None:
        for name, out in zip((names.gate, names.up, names.down), parts):
            reader.linear(f"{prefix}.{expert}.{name}", (out.shape[0], out.shape[1]), out=out)
        kernel.load_expert(weights, expert, *parts)

    for_each(moe.num_experts, scratch, load)
    return weights
