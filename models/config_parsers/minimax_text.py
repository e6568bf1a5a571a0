"""config.json of MiniMax-Text-01 and MiniMax-M1 -> ModelConfig. Imports no torch.

Published files and those that transformers saves name fields differently: both are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.config import ModelConfig
from moe_engine.models.config_parsers.families import parse_mixtral
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.config_sections.residual import ResidualScales
from moe_engine.models.config_sections.state import DeltaConfig

_STATE, _FULL = "linear_attention", "full_attention"
_PUBLISHED = {0: _STATE, 1: _FULL}
"""Kinds of layers in `attn_type_list`."""
_SERVED = {"postnorm": True, "shared_intermediate_size": 0, "attention_bias": False}


def minimax_text_fields(fields: Fields) -> Fields:
    """The fields with the kind of each layer, and with the heads of lightning attention under Qwen3-Next's names."""
    raw, heads = dict(fields.raw), fields.integer("num_attention_heads")
    width = fields.integer("head_dim", None) or fields.integer("hidden_size") // heads
    raw["layer_types"] = _kinds(fields)
    raw |= dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads)
    raw |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), width) | {"linear_gates": 0}
    return Fields(raw, fields.source)


def parse_minimax_text(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """MiniMax-Text-01 and MiniMax-M1: Mixtral with lightning attention, and norms whose results are the residual."""
    fields.check_served(_SERVED)
    if fields.has("sliding_window"):
        fields.fail("sliding_window", "is not supported in this family")
    read = minimax_text_fields(fields)
    config = parse_mixtral(read, generation)
    heads, width = read.integer("linear_num_key_heads"), read.integer("linear_key_head_dim")
    delta = DeltaConfig(heads, heads, width, width, 0, joined=False, additive=True, step_limits=(1.0, 1.0))
    states = tuple(i for i, kind in enumerate(read.raw["layer_types"]) if kind == _STATE)
    scales = ResidualScales(*(_scales(fields, *names) for names in (("full", 1), ("linear", 1), ("mlp", 0))))
    return replace(
        config,
        delta=delta if states else None,
        state_groups=delta.state_groups(states),
        residual_scales=scales,
        raw=fields.raw,
    )


def _kinds(fields: Fields) -> list[str]:
    """The kind of each layer; one at least has KV."""
    layers = fields.integer("num_hidden_layers")
    published = fields.by_layer("attn_type_list", layers, _PUBLISHED)
    kinds = fields.by_layer("layer_types", layers, _PUBLISHED.values())
    if published is not None:
        kinds = [_PUBLISHED[kind] for kind in published]
    if kinds is None:
        kinds = [_STATE if i % 2 else _FULL for i in range(layers)]
    if _FULL not in kinds:
        fields.fail("layer_types", "has no layer of attention; a model without KV is not supported")
    return kinds


def _scales(fields: Fields, part: str, is_attention: int) -> tuple[float, float]:
    """alpha and beta of a part, under transformers' names or the published ones."""
    own = f"{part}_attn" if is_attention else part
    published = f"layernorm_{part}_attention" if is_attention else f"layernorm_{part}"
    alpha, beta = (
        fields.number(f"{own}_{name}_factor", fields.number(f"{published}_{name}", 1.0)) for name in ("alpha", "beta")
    )
    return alpha, beta
