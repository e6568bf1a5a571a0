"""Seconds of the collectives of ranks that all process the same tokens: all-reduce, all-gather, reduce-scatter."""

from __future__ import annotations

from moe_engine.tuning.costs.efficiency import Efficiency
from moe_engine.tuning.costs.form import Form
from moe_engine.tuning.costs.model_facts import ModelFacts
from moe_engine.tuning.hardware.table import Cluster

STREAM_BYTES = 2
"""Bytes of an activation: bf16."""

HOP_US = 0.35
"""Additional latency of a collective for each rank in it (aiconfigurator-core 0.12.0, allreduce_h200_sglang: 3.1, 4.3
and 6.7 us for 2, 4 and 8 GPUs with 128 kB)."""


class Collectives:
    """Two all-reduces a layer; with attention groups one inside the group, and a gather and a scatter of all tokens."""

    def __init__(self, model: ModelFacts, form: Form, cluster: Cluster, share: Efficiency) -> None:
        row = model.hidden * STREAM_BYTES
        self.inside = _Ring(form.attn_tp, row, cluster, share)
        self.all = _Ring(1 if form.travels else form.ranks, row, cluster, share)
        self.layers = model.layers
        self.groups = form.attn_dp > 1

    def seconds(self, tokens: int, everyone: int) -> float:
        found = self.inside.all_reduce(tokens)
        if self.groups:  # gather + scatter move as many bytes as an all-reduce, in two launches
            found += self.all.all_reduce(everyone) + self.all.latency_s
        else:
            found += self.all.all_reduce(tokens)
        return found * self.layers


class _Ring:
    def __init__(self, ranks: int, row_bytes: int, cluster: Cluster, share: Efficiency) -> None:
        self.latency_s = self.row_s = 0.0
        if ranks == 1:
            return
        gpu = cluster.gpu
        far = ranks > cluster.domain_size
        rate = (cluster.link.bytes_per_s if far else gpu.link_bytes_per_s) * share.link
        latency = gpu.link_latency_us + HOP_US * ranks + far * 2 * cluster.link.latency_us
        self.latency_s = latency * share.message * 1e-6
        self.row_s = 2 * row_bytes * (ranks - 1) / ranks / rate

    def all_reduce(self, tokens: int) -> float:
        return self.latency_s + tokens * self.row_s
