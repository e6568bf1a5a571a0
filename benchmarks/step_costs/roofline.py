"""The minimum time of a step on a device, by a formula over config.json, independent of kernels.

    max(weights / bandwidth, products / rate) + attention: max(KV / bandwidth, operations / best rate) + messages

Weights: each used weight once (experts by expectation over uniform routing). The three parts run one after the other,
as in a layer; launches, activations and padding take no time. Legend: B requests of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.step_costs.hardware import Hardware
from benchmarks.step_work import AttentionWork, mla_work, share_touched

BF16 = 2


@dataclass(frozen=True)
class Form:
    """Layout of a model on ranks. tp: ranks that split attention, dense layers and, without `ep`, experts.

    ep: ranks with different experts. dp: attention groups.
    """

    name: str
    tp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    def nodes(self, hardware: Hardware) -> int:
        return -(-self.ranks // hardware.per_node)


FORMS = {
    "tp1": Form("tp1"), "tp8": Form("tp8", tp=8), "dp8ep8": Form("dp8ep8", dp=8, ep=8),
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
    sizes = _Sizes.of(config)
    touched = share_touched(tokens * form.dp, config.get("num_experts_per_tok", 0), sizes.experts)
    layers, moe = config["num_hidden_layers"], sizes.moe_layers
    experts = sizes.experts / form.ep
    share = tp if form.ep == 1 else 1
    weights = layers * sizes.attention.weights / tp + (layers - moe) * sizes.dense / tp
    weights += moe * (sizes.shared / tp + touched * experts * sizes.expert / share)
    kind = sizes.weight_bytes
    weight_bytes = weights * kind + moe * sizes.gate * BF16 + config["vocab_size"] * config["hidden_size"] * BF16 / tp
    active = layers * sizes.attention.weights / tp + (layers - moe) * sizes.dense / tp
    active += moe * (sizes.shared / tp + config.get("num_experts_per_tok", 0) * sizes.expert / share)
    flops = 2.0 * tokens * (active + config["vocab_size"] * config["hidden_size"] / tp)
    kv = layers * batch * context * sizes.attention.kv_elements * kv_bytes
    attention_flops = layers * tokens * context * sizes.attention.decode_flops / tp
    nvlink, network = _links(config, form, hardware, tokens, moe, layers)
    peak = hardware["peak_bytes_per_s"]
    rate = hardware["peak_flops"]["fp8" if kind == 1 else "bf16"]
    attention_us = max(kv / peak, attention_flops / hardware["best_attention_flops"]) * 1e6
    return Roofline(
        weight_bytes, kv, flops, attention_flops, nvlink, network, max(weight_bytes / peak, flops / rate) * 1e6,
        attention_us, max(nvlink / hardware["nvlink_bytes_per_s"], network / hardware["network_bytes_per_s"]) * 1e6,
    )  # fmt: skip


def prefill(config: Mapping[str, Any], form: Form, hardware: Hardware, tokens: int) -> Roofline:
    """One prompt of `tokens` tokens on each attention group."""
    step = decode(config, form, hardware, tokens, 0)
    flops = config["num_hidden_layers"] * mla_work(config).prefill_flops / form.tp * tokens * (tokens + 1) / 2
    head = 2.0 * (tokens - 1) * config["vocab_size"] * config["hidden_size"] / form.tp
    rate = hardware["peak_flops"]["fp8" if "quantization_config" in config else "bf16"]
    products = step.product_flops - head
    weights_us = max(step.weight_bytes / hardware["peak_bytes_per_s"], products / rate) * 1e6
    return Roofline(
        step.weight_bytes, 0.0, products, flops, step.nvlink_bytes, step.network_bytes, weights_us,
        flops / hardware["best_attention_flops"] * 1e6, step.links_us,
    )  # fmt: skip


@dataclass(frozen=True)
class _Sizes:
    """Weights of a layer, in elements: dense MLP, shared expert, one routed expert, gate."""

    attention: AttentionWork
    dense: int
    shared: int
    expert: int
    gate: int
    experts: int
    moe_layers: int
    weight_bytes: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Sizes:
        hidden = config["hidden_size"]
        experts = config.get("n_routed_experts") or 0
        expert = 3 * hidden * config["moe_intermediate_size"] if experts else 0
        return cls(
            attention=mla_work(config),
            dense=3 * hidden * config["intermediate_size"],
            shared=config.get("n_shared_experts", 0) * expert,
            expert=expert,
            gate=experts * hidden,
            experts=experts,
            moe_layers=config["num_hidden_layers"] - config["first_k_dense_replace"] if experts else 0,
            weight_bytes=1 if "quantization_config" in config else BF16,
        )


def _links(
    config: Mapping[str, Any], form: Form, hardware: Hardware, tokens: int, moe: int, layers: int
) -> tuple[float, float]:
    """Bytes that a rank sends over NVLink and the network: dispatch in FP8 and combine in bf16 of each (token, expert)
    pair, over the network once for each token; or two all-reduces a layer (a multimem kernel moves each row twice)."""
    hidden = config["hidden_size"]
    if form.ep == 1:
        rows = 2 * layers * tokens * hidden * BF16 * 2 * (form.tp - 1) / form.tp
        return rows, 0.0
    quantized = hidden + hidden // 128 * 4 if "quantization_config" in config else hidden * BF16
    row = quantized + hidden * BF16
    nodes, pairs = form.nodes(hardware), tokens * config["num_experts_per_tok"]
    near = pairs * (form.ranks // nodes - 1) / form.ranks * row * moe
    return near, tokens * (nodes - 1) * row * moe if nodes > 1 else 0.0
