"""Routed experts in plain torch: one pair of products per expert with rows.

Legend: D hidden, I expert width, E experts, M rows.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.kernels.experts.batch import ExpertBatch, ExpertBiases, ExpertWeights
from moe_engine.kernels.experts.protocol import ExpertsCapabilities
from moe_engine.kernels.gated_activation import activate, clamped
from moe_engine.kernels.permutation.reference import TorchPermutation
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, ActivationFormat


class TorchExperts:
    """`ExpertsKernel` for any device; supports both layouts. `data` is (gate_up [E, 2I, D], down [E, D, I]), without a
    gate (up [E, I, D], down)."""

    name = "torch"
    _permutation = TorchPermutation()

    @property
    def capabilities(self) -> ExpertsCapabilities:
        squared = partial(self.allocate, squared=True)
        return ExpertsCapabilities(takes_shared=True, biases=True, clamps=True, allocate_squared=squared)

    def allocate(
        self, num_experts: int, hidden: int, width: int, dtype: Any, device: Any, squared: bool = False
    ) -> ExpertWeights:
        rows = width if squared else 2 * width
        gate_up = torch.empty(num_experts, rows, hidden, dtype=dtype, device=device)
        down = torch.empty(num_experts, hidden, width, dtype=dtype, device=device)
        num_bytes = (gate_up.numel() + down.numel()) * gate_up.element_size()
        return ExpertWeights(num_experts, hidden, width, (gate_up, down), num_bytes)

    def load_expert(self, weights: ExpertWeights, expert: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        gate_up, downs = weights.data
        gate_up[expert, : len(gate)].copy_(gate)
        gate_up[expert, len(gate) :].copy_(up)
        downs[expert].copy_(down)

    def expert_memory(self, weights: ExpertWeights, expert: int) -> list[Tensor]:
        return [part[expert] for part in weights.data]

    def input_format(self, weights: ExpertWeights) -> ActivationFormat:
        return UNQUANTIZED

    def run(self, batch: ExpertBatch, weights: ExpertWeights) -> Tensor:
        out = torch.empty_like(batch.x)
        for expert, rows, target in _groups(batch, out):
            gate_up, down = weights.data
            if weights.bias is not None:
                target.copy_(_biased(rows, gate_up[expert], down[expert], weights.bias, expert))
                continue
            gate, up = F.linear(rows, gate_up[expert]).chunk(2, dim=-1)
            target.copy_(F.linear(activate(gate, up, weights.activation), down[expert]))
        return out

    def run_routed(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, weights: ExpertWeights, add: Tensor | None = None
    ) -> Tensor:
        """See the protocol. Synchronizes with the device, as `run` does."""
        order = self._permutation.sort_by_expert(topk_ids, weights.num_experts)
        tokens = order.source[: int(order.offsets[-1])].div(topk_ids.shape[1], rounding_mode="floor")
        batch = ExpertBatch("grouped", x.index_select(0, tokens), offsets=order.offsets)
        return self._permutation.combine(self.run(batch, weights), order.positions, topk_weights, add)


def _biased(rows: Tensor, gate_up: Tensor, down: Tensor, bias: ExpertBiases, expert: int) -> Tensor:
    """rows [M, D] through an expert with biases and the clamped activation."""
    gate, up = (F.linear(rows, gate_up).float() + bias.gate_up[expert]).chunk(2, dim=-1)
    gate, up = clamped(gate, up, bias.limit)
    inner = ((up + 1) * (gate * torch.sigmoid(bias.alpha * gate))).to(rows.dtype)
    return F.linear(inner, down).float() + bias.down[expert]


def _groups(batch: ExpertBatch, out: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """(expert, its rows, its output rows) of each expert with rows."""
    if batch.layout == "padded":
        assert batch.counts is not None
        counts = batch.counts.tolist()
        return [(e, batch.x[e, :count], out[e, :count]) for e, count in enumerate(counts) if count]
    assert batch.offsets is not None
    offsets = batch.offsets.tolist()
    spans = [(e, slice(start, stop)) for e, (start, stop) in enumerate(pairwise(offsets)) if stop > start]
    return [(e, batch.x[span], out[span]) for e, span in spans]
