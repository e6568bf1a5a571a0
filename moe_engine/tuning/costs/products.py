"""Seconds of the projections, experts and head of a step: weights read once, or operations."""

from __future__ import annotations

from moe_engine.tuning.costs.efficiency import Efficiency
from moe_engine.tuning.costs.form import Form, Precision, Weights
from moe_engine.tuning.costs.imbalance import SHARES, Popularity, busiest_active
from moe_engine.tuning.costs.model_facts import ModelFacts
from moe_engine.tuning.hardware.table import GpuFacts


class Products:
    """(seconds of bytes, seconds of operations) of each part of a step, on one rank."""

    def __init__(self, model: ModelFacts, form: Form, precision: Precision, gpu: GpuFacts, share: Efficiency) -> None:
        tp = form.attn_tp
        whole = form.dense_whole or form.travels
        cut = 1 if whole else form.ranks
        attention = sum(each.layers * (each.sharded / tp + each.replicated) for each in model.attention)
        beside = model.dense_layers * model.dense / cut + model.moe_layers * model.shared / cut
        router = model.moe_layers * (model.num_experts + model.zero_experts) * model.hidden
        other, bandwidth = precision.other_weights.num_bytes, gpu.peak_bytes_per_s
        kept = _kept(precision.other_weights, gpu)
        rate, read = gpu.rate(precision.other_weights.units) * share.flops * kept, bandwidth * share.hbm * kept
        self.own_bytes_s = attention * other / read
        self.own_flops_s = 2 * attention / rate  # for a token of this attention group
        self.shared_bytes_s = beside * other / read + router * 2 / (bandwidth * share.hbm)
        self.shared_flops_s = 2 * (beside + router / (form.ranks if form.travels else 1)) / rate
        self.everyone = not whole
        head_cut = tp if form.attn_dp > 1 else form.ranks
        self.head_bytes_s = 2 * model.head / head_cut / (bandwidth * share.hbm)
        self.head_flops_s = 2 * model.head / head_cut / (gpu.rate("bf16") * share.flops)
        self.num_experts, self.top_k = model.num_experts, model.top_k
        self.popularity = Popularity(model.top_k / model.num_experts if model.num_experts else 1.0)
        self.active = busiest_active(-(-(model.num_experts + form.redundant) // form.ep), form.ep)
        held = model.moe_layers * model.expert / form.moe_tp
        kept = _kept(precision.expert_weights, gpu)
        self.expert_bytes_s = held * precision.expert_weights.num_bytes / (bandwidth * share.experts_hbm * kept)
        peak = gpu.rate(precision.expert_weights.units) * share.flops * kept
        self.experts_flops_s = 2 * model.top_k / form.ep * held / peak  # for a token of the expert-parallel group
        self.least_tokens = precision.expert_rows * self.num_experts / max(1, self.top_k)
        self.token_s = model.layers * share.token_ns * 1e-12 * model.hidden * _NOMINAL / bandwidth

    def parts(self, tokens: int, logits: int, everyone: int, skew: float) -> tuple[tuple[float, float], ...]:
        """tokens, everyone: tokens of this attention group, and of all attention groups. logits: rows that the head
        computes."""
        shared = everyone if self.everyone else tokens
        found = [
            (self.own_bytes_s, self.own_flops_s * tokens),
            (self.shared_bytes_s, self.shared_flops_s * shared),
            (self.head_bytes_s, self.head_flops_s * logits),
        ]
        if self.num_experts:
            padded = max(everyone * skew, self.least_tokens)
            found.append((self.expert_bytes_s * self._read(everyone), self.experts_flops_s * padded))
        return tuple(found)

    def _read(self, tokens: int) -> float:
        """Experts of the busiest rank that these tokens activate, by expectation."""
        place = (1.0 - self.popularity.idle(tokens)) * (SHARES - 1)
        below = min(int(place), SHARES - 2)
        return self.active[below] + (place - below) * (self.active[below + 1] - self.active[below])


DEQUANTIZED = 0.68
"""Share of their rate that products keep whose kernels dequantize weights: 34 of 50 cycles, as in FlashMLA's note of
2025-09-29 on FP8 KV."""


def _kept(weights: Weights, gpu: GpuFacts) -> float:
    """4-bit weights are dequantized on GPUs without units for them."""
    return DEQUANTIZED if weights.num_bytes < 1.0 and (weights.units != "fp4" or "fp4" not in gpu.flops) else 1.0


_NOMINAL = 4.8e12
"""Bandwidth for which `token_ns` holds: small kernels are bound by bytes."""
