"""The cost of a step from its resources, one after the other as in a layer; two-batch overlap hides messages."""

from __future__ import annotations

from functools import lru_cache

from moe_engine.tuning.costs.all_to_all import AllToAll
from moe_engine.tuning.costs.attention import Attention
from moe_engine.tuning.costs.collectives import Collectives
from moe_engine.tuning.costs.efficiency import Efficiency
from moe_engine.tuning.costs.form import Form, Precision
from moe_engine.tuning.costs.imbalance import expected_skew
from moe_engine.tuning.costs.model_facts import ModelFacts
from moe_engine.tuning.costs.overheads import Host, Launches
from moe_engine.tuning.costs.products import Products
from moe_engine.tuning.costs.step_cost import StepCost, StepShape
from moe_engine.tuning.hardware.table import Cluster

HIDDEN = 0.5
"""Share of balanced messages that two-batch overlap hides: their kernels take multiprocessors, and the wait for slow
ranks remains. SGLang's report of 2025-05-05: 27 to 35 % more prompt tokens, 25.5 % more output tokens at 256 requests a
GPU."""


class RooflineCost:
    """Seconds of a step of the busiest rank. A `StepCostModel`.

    Args:
        model: facts of config.json.
        form: the ranks of a replica.
        precision: dtypes of weights and KV.
        cluster: GPU and network.
        share: the share of them that the engine reaches.
        deviation: factor on everything, from points measured with this model (1: none).
    """

    def __init__(
        self,
        model: ModelFacts,
        form: Form,
        precision: Precision,
        cluster: Cluster,
        share: Efficiency,
        deviation: float = 1.0,
    ) -> None:
        self._products = Products(model, form, precision, cluster.gpu, share)
        self._attention = Attention(model, form, precision, cluster.gpu, share)
        self._collectives = Collectives(model, form, cluster, share)
        self._all_to_all = AllToAll(model, form, precision, cluster)
        self._launches, self._host = Launches(model, precision, share), Host(share)
        self._bus_s = form.host_bytes / cluster.gpu.bus_bytes_per_s
        self._form, self._deviation, self._layers = form, deviation, model.layers
        self._skew = expected_skew(model.num_experts, form) if form.travels else 1.0
        self._known = lru_cache(maxsize=1 << 13)(self._beside_attention)

    def step(self, shape: StepShape) -> StepCost:
        """Raises nothing; a step without tokens costs its launches."""
        skew, drafted = shape.expert_skew or self._skew, shape.decode_rows * (1 + shape.drafts)
        tokens = drafted + shape.prefill_tokens
        everyone, prompts = max(tokens, shape.global_tokens), shape.prefill_tokens > 0
        counts = tokens, drafted + prompts, everyone, prompts, skew
        hbm, flops, dispatched, hidden, reduced = self._known(*counts)
        bytes_s, flops_s = self._attention.seconds(shape)
        if bytes_s > flops_s:
            hbm += bytes_s
        else:
            flops += flops_s
        flops += tokens * self._products.token_s
        launches, host = self._launches.seconds(shape), self._host.seconds(shape)
        if hidden is not None:  # each half reads the weights and is launched
            dispatched -= min(hidden, hbm + flops)
            launches *= 2
        if shape.drafts:  # each draft runs one layer and the head
            more = shape.drafts / self._layers
            hbm, flops, launches = hbm * (1 + more), flops * (1 + more), launches * (1 + more)
        by = {
            "hbm": hbm, "flops": flops, "all_to_all": dispatched, "all_reduce": reduced, "launches": launches,
            "host": host,
        }  # fmt: skip
        if self._deviation != 1.0:
            by = {name: seconds * self._deviation for name, seconds in by.items()}
        if self._bus_s:  # weights are copied while the step computes
            by["bus"] = max(0.0, self._bus_s - sum(by.values()))
        return StepCost(sum(by.values()), by)

    def _beside_attention(
        self, tokens: int, logits: int, everyone: int, prompts: bool, skew: float
    ) -> tuple[float, float, float, float | None, float]:
        """Parts of a step that do not depend on the context: HBM, operations, messages, what two-batch overlap may hide
        of these (None without it), and collectives."""
        form, hbm, flops = self._form, 0.0, 0.0
        halves = 2 if form.overlap and tokens > 1 else 1
        parts = self._products.parts(-(-tokens // halves), -(-logits // halves), -(-everyone // halves), skew)
        for bytes_s, flops_s in parts * halves:
            if bytes_s > flops_s:
                hbm += bytes_s
            else:
                flops += flops_s
        sent = -(-tokens // form.attn_tp)  # without dispatch a rank sends its share of the attention group's rows
        dispatched = self._all_to_all.seconds(sent, skew, prompts)
        hidden = HIDDEN * self._all_to_all.seconds(sent, 1.0, prompts) if halves == 2 else None
        return hbm, flops, dispatched, hidden, self._collectives.seconds(tokens, everyone)
