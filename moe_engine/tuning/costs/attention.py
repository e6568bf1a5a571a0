"""Seconds of attention in a step: KV and states read, and operations."""

from __future__ import annotations

from moe_engine.tuning.costs.efficiency import Efficiency
from moe_engine.tuning.costs.form import KV_BYTES, Form, Precision
from moe_engine.tuning.costs.model_facts import CACHED_STATE_BYTES, AttentionFacts, ModelFacts
from moe_engine.tuning.costs.step_cost import StepShape
from moe_engine.tuning.hardware.table import GpuFacts


class Attention:
    """(seconds of bytes, seconds of operations) of all layers on one rank."""

    def __init__(self, model: ModelFacts, form: Form, precision: Precision, gpu: GpuFacts, share: Efficiency) -> None:
        bandwidth = gpu.peak_bytes_per_s * share.attention_hbm
        rate = gpu.rate("bf16") * share.attention_flops
        self.groups = tuple(
            _Group(each, form.attn_tp, KV_BYTES[precision.kv], bandwidth, rate) for each in model.attention
        )

    def seconds(self, shape: StepShape) -> tuple[float, float]:
        """shape: that of the step. Several drafts of a row read its KV once."""
        bytes_s = flops_s = 0.0
        rows, context = shape.decode_rows, shape.decode_context
        queries = 1 + shape.drafts
        for group in self.groups:
            read, pairs = context, shape.prefill_pairs
            if group.limit:
                read = min(read, rows * group.limit)
                pairs = min(pairs, shape.prefill_tokens * group.limit)
                if group.index_flops_s:
                    flops_s += (context * queries + shape.prefill_pairs) * group.index_flops_s
                    bytes_s += context * group.index_bytes_s
            bytes_s += read * group.kv_bytes_s + rows * group.state_bytes_s
            flops_s += read * queries * group.decode_flops_s + pairs * group.prefill_flops_s
        return bytes_s, flops_s


class _Group:
    def __init__(self, facts: AttentionFacts, tp: int, kv_bytes: float, bandwidth: float, rate: float) -> None:
        held = max(1, min(tp, facts.kv_heads))
        self.limit = facts.limit
        self.kv_bytes_s = facts.layers * facts.kv_width / held * kv_bytes / bandwidth
        self.index_bytes_s = facts.layers * facts.index_bytes / bandwidth
        self.index_flops_s = facts.layers * facts.index_flops / rate
        self.decode_flops_s = facts.layers * facts.decode_flops / tp / rate
        self.prefill_flops_s = facts.layers * facts.prefill_flops / tp / rate
        states = facts.layers * facts.state_numbers / tp * CACHED_STATE_BYTES
        self.state_bytes_s = 2 * states / bandwidth  # read and written
