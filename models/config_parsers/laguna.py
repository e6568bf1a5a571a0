"""config.json of Laguna -> ModelConfig. Imports no torch.

Layers with a window have more query heads, and a rotary embedding of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.config import GQAConfig, ModelConfig
from moe_engine.models.config_parsers.families import check_moe, deepseek_moe_layers, parse_gqa, with_other_windows
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.config_sections.moe import MoEConfig

_FULL, _WINDOW = "full_attention", "sliding_attention"
_ROPE: Mapping[str, Mapping[str, Any]] = {
    _FULL: {"rope_theta": 500000.0, "partial_rotary_factor": 0.5}, _WINDOW: {"rope_theta": 10000.0},
}  # fmt: skip
"""Rotary settings of a file without `rope_parameters`."""
_SERVED = {
    "norm_topk_prob": True, "moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0,
    "swa_attention_sink_enabled": False, "qkv_bias": False, "gating": (True, "per-head", "per-element"),
}  # fmt: skip


def parse_laguna(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Laguna: a gate by softplus for each head, norms of q and k, a sigmoid router with a bias, a shared expert."""
    fields.check_served(_SERVED)
    read = laguna_fields(fields)
    moe = MoEConfig(
        num_experts=read.integer("num_experts"),
        top_k=read.integer("num_experts_per_tok"),
        width=read.integer("moe_intermediate_size"),
        shared_width=read.integer("shared_expert_intermediate_size"),
        score="sigmoid",
        has_bias=True,
        renormalize=True,
        scale=read.number("moe_routed_scaling_factor", 1.0),
    )
    check_moe(fields, moe)
    bias, by_channel = read.flag("attention_bias"), read.raw.get("gating") == "per-element"
    config = parse_gqa(
        read,
        generation,
        moe,
        deepseek_moe_layers(read, moe),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        gate_width=read.integer("head_dim") if by_channel else 1,
        gate_softplus=True,
    )
    config = replace(config, raw=fields.raw)
    if not config.windows:
        return config
    whole, heads = config.attention, read.integer("swa_num_attention_heads")
    assert isinstance(whole, GQAConfig)
    if heads % whole.num_kv_heads:
        fields.fail("num_attention_heads_per_layer", f"has {heads}, no multiple of the {whole.num_kv_heads} KV heads")
    return with_other_windows(config, read, read.raw["swa_rope"], num_heads=heads)


def laguna_fields(fields: Fields) -> Fields:
    """The fields with transformers' defaults, and heads and rotary settings by kind of layer under the names of
    MiMo-V2-Flash and Step 3.5."""
    layers = fields.integer("num_hidden_layers")
    raw: dict[str, Any] = {
        "head_dim": 128, "sliding_window": 512, "max_position_embeddings": 131072, "num_experts_per_tok": 8,
        "use_head_wise_attn_gate": fields.raw.get("gating") != "per-element",
        "attn_output_gate": fields.raw.get("gating") == "per-element",
        **fields.present(),
    }  # fmt: skip
    kinds = fields.items("layer_types") or [_FULL] * layers
    heads = [fields.integer("num_attention_heads")]
    counts, dense = fields.items("num_attention_heads_per_layer") or heads * layers, fields.items("mlp_only_layers", 0)
    raw |= {
        "layer_types": kinds, "use_sliding_window": True,
        "mlp_layer_types": raw.get("mlp_layer_types") or ["dense" if i in dense else "sparse" for i in range(layers)],
        "rope_scaling": _rope(fields, _FULL), "swa_rope": _rope(fields, _WINDOW),
    }  # fmt: skip
    for kind, name in ((_FULL, "num_attention_heads"), (_WINDOW, "swa_num_attention_heads")):
        found = [count for own, count in zip(kinds, counts) if own == kind] or heads
        if found != found[:1] * len(found):
            fields.fail("num_attention_heads_per_layer", f"has {found} for {kind}: they must be the same")
        raw[name] = found[0]
    for name in ("rope_parameters", "rope_theta", "partial_rotary_factor", "mlp_only_layers"):
        raw.pop(name, None)
    return Fields(raw, fields.source)


def _rope(fields: Fields, kind: str) -> Mapping[str, Any]:
    section = fields.section("rope_parameters")
    own = None if section is None else section.section(kind)
    return _ROPE[kind] if own is None else own.raw
