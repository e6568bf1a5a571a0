"""config.json of Trinity (`afmoe`) -> ModelConfig. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.config import GQAConfig, ModelConfig, OtherLayers
from moe_engine.models.config_parsers.families import (
    deepseek_moe_layers,
    parse_deepseek_moe,
    parse_gqa,
    with_window_layers,
)
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.config_sections.residual import ResultNorms

_SERVED = {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}


def parse_afmoe(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Trinity Nano, Mini and Large: windows with positions in three of four layers, no positions in the others, a gate
    for each channel, norms of results, a sigmoid router with a bias, shared experts."""
    fields.check_served(_SERVED)
    read = afmoe_fields(fields)
    moe = parse_deepseek_moe(read)
    if moe is None:
        fields.fail("num_experts", "is missing; add it, or pass it with --json-model-override-args")
    bias, head = read.flag("attention_bias"), read.integer("head_dim")
    config = parse_gqa(
        read,
        generation,
        moe,
        deepseek_moe_layers(read, moe),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        gate_width=head,
    )
    assert isinstance(config.attention, GQAConfig)
    others = OtherLayers(config.windowed_layers, config.attention, config.rope)
    scale = config.hidden_size**0.5 if fields.flag("mup_enabled") else 1.0
    normed = replace(config, result_norms=ResultNorms(), embed_scale=scale)
    return replace(normed, rope=config.rope.still(head), other_layers=others, raw=fields.raw)


def afmoe_fields(fields: Fields) -> Fields:
    """The fields under DeepSeek's names, with transformers' defaults."""
    raw: dict[str, Any] = {
        "head_dim": 128, "num_experts_per_tok": 6, "sliding_window": 1024, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 16384, **fields.present(),
    }  # fmt: skip
    raw |= {
        "attn_output_gate": True, "n_routed_experts": raw.get("num_experts"),
        "n_shared_experts": fields.integer("num_shared_experts", 2, minimum=0),
        "first_k_dense_replace": fields.integer("num_dense_layers", 1, minimum=0), "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": fields.number("route_scale", 1.0),
    }  # fmt: skip
    return with_window_layers(Fields(raw, fields.source), fields.integer("global_attn_every_n_layers", 4))
