"""Seconds of expert dispatch and combine: latency, and the bytes of the slower of NVLink and network.

Steps with prompts use the normal mode, which sends a row once to each node and waits for its counts; decodes use low
latency, which sends a row to each expert (`StepSizes.phase`).
"""

from __future__ import annotations

from moe_engine.tuning.costs.form import Form, Precision
from moe_engine.tuning.costs.model_facts import ModelFacts
from moe_engine.tuning.hardware.table import Cluster

COMBINE_BYTES = 2.0
"""Bytes of a channel: bf16."""

NEAR_SHARE = 0.55
"""Share of NVLink's bandwidth that dispatch reaches (aiconfigurator-core 0.12.0, deepep_h200_sxm: 213 to 295 of 450
GB/s)."""

LOW_LATENCY_TOKENS = 512
"""Tokens of a rank up to which low latency is meant (DeepEP README)."""

NEAR_US, FAR_US, NORMAL_US = 26.0, 22.0, 58.0
"""Latency of dispatch + combine of one token on a node, what more nodes add, and what the normal mode adds."""


class AllToAll:
    """Dispatch and combine of all MoE layers."""

    def __init__(self, model: ModelFacts, form: Form, precision: Precision, cluster: Cluster) -> None:
        self.active = form.travels and form.ep > 1
        if not self.active:
            return
        row = model.routed * (precision.dispatch_bytes + COMBINE_BYTES)
        domains = max(1.0, form.ranks / cluster.domain_size)
        copies = model.top_k * (form.ranks - 1) / form.ranks
        far_copies = model.top_k * (1 - 1 / domains)
        near = row * (copies - far_copies) / (cluster.gpu.link_bytes_per_s * NEAR_SHARE)
        self.low_s = max(near, row * far_copies / cluster.link.bytes_per_s)
        hit = (domains - 1) * (1 - (1 - 1 / domains) ** model.top_k) if domains > 1 else 0.0
        self.normal_s = max(near + row * hit / cluster.gpu.link_bytes_per_s, row * hit / cluster.link.bytes_per_s)
        latency = NEAR_US * (3.0 / max(3.0, cluster.gpu.link_latency_us)) + (domains > 1) * FAR_US
        self.latency_s = latency * 1e-6
        self.normal_latency_s = NORMAL_US * 1e-6
        self.layers = model.moe_layers

    def seconds(self, tokens: int, skew: float, prompts: bool = False) -> float:
        """tokens: number that this rank sends. prompts: whether the step has prompts."""
        if not self.active:
            return 0.0
        normal = self.normal_latency_s + tokens * self.normal_s
        messages = normal if prompts else min(tokens, LOW_LATENCY_TOKENS) * self.low_s
        if tokens > LOW_LATENCY_TOKENS:  # more decodes take no less time, also where the mode changes
            messages = max(messages, normal)
        return self.layers * (self.latency_s + messages * skew)
