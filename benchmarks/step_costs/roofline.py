"""The minimum time of a step on a device, by a formula over config.json, independent of kernels.

    max(weights / bandwidth, products / rate) + attention: max(KV / bandwidth, operations / best rate) + messages

Weights: each used weight once (experts by expectation over uniform routing). The three parts run one after the other,
as in a layer; launches, activations and padding take no time. Legend: B requests of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.step_costs.hardware import Hardware
from benchmarks.step_costs.layers import BF16, bytes_of, layers_of, num_experts
from benchmarks.step_work import share_touched


@dataclass(frozen=True)
class Form:
    """Layout of a model on ranks. tp: ranks that split attention and dense layers.

    ep: groups of ranks with different experts, which the ranks of a group split. dp: attention groups.
    """

    name: str
    tp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    @property
    def expert_tp(self) -> int:
        """Ranks that split an expert."""
        return self.ranks // self.ep

    @property
    def travels(self) -> bool:
        """True if tokens are dispatched to their experts' ranks; otherwise each rank has all tokens."""
        return self.ep > 1 and self.dp > 1

    def nodes(self, hardware: Hardware) -> int:
        return -(-self.ranks // hardware.per_node)


FORMS = {
    "tp1": Form("tp1"), "tp4": Form("tp4", tp=4), "tp8": Form("tp8", tp=8), "tp8ep2": Form("tp8ep2", tp=8, ep=2),
    "dp8ep8": Form("dp8ep8", dp=8, ep=8),
    "dp16ep16": Form("dp16ep16", dp=16, ep=16),
}  # fmt: skip


@dataclass(frozen=True)
class Roofline:
    """Minimum microseconds of a rank's step, and their parts; bytes and operations of that rank."""

    weight_bytes: float
    kv_bytes: float
    product_flops: float
    attention_flops: float
    nvlink_bytes: float
    network_bytes: float
    weights_us: float
    attention_us: float
    links_us: float

    @property
    def microseconds(self) -> float:
        return self.weights_us + self.attention_us + self.links_us


def decode(
    config: Mapping[str, Any], form: Form, hardware: Hardware, batch: int, context: int, query_tokens: int = 1,
    kv_bytes: float = 2,
) -> Roofline:  # fmt: skip
    """A step of `batch` requests of a rank, or of its group with `form.tp`, each with `query_tokens` tokens.

    Args:
        kv_bytes: of a channel of the cache, its share of the scales included.
    """
    tokens, tp = batch * query_tokens, form.tp
    step = _products(config, form, hardware, tokens)
    kv = state = flops = 0.0
    for count, layer in layers_of(config):
        kept = min(tp, layer.kv_heads)
        kv += count * batch * (layer.seen(context) * layer.record / BF16 * kv_bytes / kept + context * layer.indexed)
        state += count * batch * 2 * layer.state / tp
        index_flops = layer.index_flops / min(tp, layer.index_parts)
        seen = layer.seen(context) * layer.flops / tp + context * index_flops + layer.token_flops / tp
        flops += count * tokens * seen
    peak = hardware["peak_bytes_per_s"]
    attention_us = max((kv + state) / peak, flops / hardware["best_attention_flops"]) * 1e6
    return replace(step, kv_bytes=kv + state, attention_flops=flops, attention_us=attention_us)


def prefill(config: Mapping[str, Any], form: Form, hardware: Hardware, tokens: int) -> Roofline:
    """One prompt of `tokens` tokens on each attention group."""
    step = _products(config, form, hardware, tokens)
    flops = 0.0
    for count, layer in layers_of(config):
        pairs = sum(map(layer.seen, range(1, tokens + 1)))
        every = tokens * (tokens + 1) / 2
        index_flops = layer.index_flops / min(form.tp, layer.index_parts)
        seen = layer.prefill_flops / form.tp * pairs + index_flops * every
        flops += count * (seen + layer.token_flops * tokens / form.tp)
    head = 2.0 * (tokens - 1) * config["vocab_size"] * config["hidden_size"] / form.tp
    products = step.product_flops - head
    weights_us = max(step.weight_bytes / hardware["peak_bytes_per_s"], products / _rate(config, hardware)) * 1e6
    return replace(
        step, product_flops=products, attention_flops=flops, weights_us=weights_us,
        attention_us=flops / hardware["best_attention_flops"] * 1e6,
    )  # fmt: skip


def _rate(config: Mapping[str, Any], hardware: Hardware) -> float:
    return float(hardware["peak_flops"]["fp8" if bytes_of(config)[1] == 1 else "bf16"])


def _products(config: Mapping[str, Any], form: Form, hardware: Hardware, tokens: int) -> Roofline:
    """Weights, products and messages of `tokens` tokens of a rank; nothing of attention."""
    tp, ranks = form.tp, form.expert_tp
    experts, top_k = num_experts(config), config.get("num_experts_per_tok") or 0
    touched = share_touched(tokens * form.dp, top_k, experts) * experts / form.ep
    of_expert, of_others = bytes_of(config)
    head = config["vocab_size"] * config["hidden_size"] / tp
    weight_bytes, active, mixtures = head * BF16, head, 0
    for count, layer in layers_of(config):
        common = (layer.attention + layer.dense) / tp
        weight_bytes += count * (common * of_others + layer.gate * BF16 + touched * layer.expert / ranks * of_expert)
        chosen = top_k if form.travels else top_k / form.ep  # of a token on this rank, or of its tokens on all ranks
        active += count * (common + chosen * layer.expert / ranks)
        mixtures += count if layer.expert else 0
    nvlink, network = _links(config, form, hardware, tokens, mixtures, config["num_hidden_layers"])
    flops = 2.0 * tokens * active
    weights_us = max(weight_bytes / hardware["peak_bytes_per_s"], flops / _rate(config, hardware)) * 1e6
    links_us = max(nvlink / hardware["nvlink_bytes_per_s"], network / hardware["network_bytes_per_s"]) * 1e6
    return Roofline(weight_bytes, 0.0, flops, 0.0, nvlink, network, weights_us, 0.0, links_us)


def _links(
    config: Mapping[str, Any], form: Form, hardware: Hardware, tokens: int, moe: int, layers: int
) -> tuple[float, float]:
    """Bytes that a rank sends over NVLink and the network: dispatch in FP8 and combine in bf16 of each (token, expert)
    pair, over the network once for each token; or two all-reduces a layer (a multimem kernel moves each row twice)."""
    hidden = config["hidden_size"]
    if not form.travels:
        rows = 2 * layers * tokens * hidden * BF16 * 2 * (form.tp - 1) / form.tp
        return rows, 0.0
    quantized = hidden + hidden // 128 * 4 if bytes_of(config)[1] == 1 else hidden * BF16
    row = quantized + hidden * BF16
    nodes, pairs = form.nodes(hardware), tokens * config["num_experts_per_tok"]
    near = pairs * (form.ranks // nodes - 1) / form.ranks * row * moe
    return near, tokens * (nodes - 1) * row * moe if nodes > 1 else 0.0
