"""The cost of a step from its resources, one after the other as in a layer; two-batch overlap hides messages."""

from __future__ import annotations

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

    def step(self, shape: StepShape) -> StepCost:
        """Raises nothing; a step without tokens costs its launches."""
        form, skew = self._form, shape.expert_skew or self._skew
        tokens = shape.decode_rows * (1 + shape.drafts) + shape.prefill_tokens
        everyone = max(tokens, shape.global_tokens)
        logits = shape.decode_rows * (1 + shape.drafts) + (1 if shape.prefill_tokens else 0)
        hbm = flops = 0.0
        halves = 2 if form.overlap and tokens > 1 else 1
        parts = self._products.parts(-(-tokens // halves), -(-logits // halves), -(-everyone // halves), skew)
        for bytes_s, flops_s in (*parts * halves, self._attention.seconds(shape)):
            if bytes_s > flops_s:
                hbm += bytes_s
            else:
                flops += flops_s
        flops += tokens * self._products.token_s
        # without dispatch a rank sends its share of the attention group's rows
        sent, prompts = -(-tokens // form.attn_tp), shape.prefill_tokens > 0
        dispatched = self._all_to_all.seconds(sent, skew, prompts)
        reduced = self._collectives.seconds(tokens, everyone)
        launches, host = self._launches.seconds(shape), self._host.seconds(shape)
        if halves == 2:  # each half reads the weights and is launched
            dispatched -= min(HIDDEN * self._all_to_all.seconds(sent, 1.0, prompts), hbm + flops)
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
