"""config.json of LFM2 and LFM2-MoE -> ModelConfig. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.checkpoint_names.lfm2_names import inner_name
from moe_engine.models.checkpoint_names.names import renamed_modules
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_parsers.families import FULL, deepseek_moe_layers, parse_gqa, plain_experts
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.config_sections.moe import MoEConfig
from moe_engine.models.config_sections.state import ShortConvConfig

CONV = "conv"
"""The kind of a layer with a short convolution."""


def parse_lfm2(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """LFM2: short convolutions, and attention with norms of q and k in some layers."""
    return _parse(fields, generation, None)


def parse_lfm2_moe(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """LFM2-MoE: the same with experts after the first layers, and a sigmoid router whose bias is for the choice
    alone."""
    moe = plain_experts(
        fields, "num_experts", "moe_intermediate_size", score="sigmoid", has_bias=fields.flag("use_expert_bias", True),
        renormalize=fields.flag("norm_topk_prob", True), scale=fields.number("routed_scaling_factor", 1.0),
        sum_eps=1e-6,
    )  # fmt: skip
    return _parse(fields, generation, moe)


def _parse(fields: Fields, generation: Mapping[str, Any], moe: MoEConfig | None) -> ModelConfig:
    fields.check_served({"conv_bias": False})
    read = lfm2_fields(fields)
    kinds = read.by_layer("layer_types", read.integer("num_hidden_layers"), (CONV, FULL)) or []
    if FULL not in kinds:
        fields.fail("layer_types", "has no layer of attention; a model without KV is not supported")
    layers = deepseek_moe_layers(read, moe)
    config = parse_gqa(read, generation, moe, layers, qk_norm="head", qkv_bias=False, o_bias=False)
    states = tuple(i for i, kind in enumerate(kinds) if kind == CONV)
    own = ShortConvConfig(config.hidden_size, read.integer("conv_L_cache", minimum=2))
    return replace(
        config, short_conv=own if states else None, state_groups=own.state_groups(states), windows=(), raw=fields.raw
    )


def lfm2_fields(fields: Fields) -> Fields:
    """The fields under common names, with the kinds of all layers, the width of dense layers, and the modules of
    quantization_config as they are named here."""
    raw, layers = dict(fields.raw), fields.integer("num_hidden_layers")
    if not fields.has("layer_types"):
        attention = fields.items("full_attn_idxs", *range(layers))
        raw["layer_types"] = [FULL if i in attention else CONV for i in range(layers)]
    raw["rms_norm_eps"] = fields.number("norm_eps", 1e-5, above=0)
    raw["conv_L_cache"] = fields.integer("conv_L_cache", 3, minimum=2)
    raw["first_k_dense_replace"] = fields.integer("num_dense_layers", 2, minimum=0)
    if fields.has("tie_embedding"):
        raw["tie_word_embeddings"] = fields.flag("tie_embedding")
    if not fields.has("num_experts"):
        raw["intermediate_size"] = _dense_width(fields)
    if (stored := fields.section("quantization_config")) is not None:
        raw["quantization_config"] = renamed_modules(stored.raw, inner_name)
    return Fields(raw, fields.source)


def _dense_width(fields: Fields) -> int:
    """Two thirds of the stated width, times a factor, in whole blocks."""
    width: int = fields.integer("block_ff_dim", None) or fields.integer("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return width
    factor, each = fields.number("block_ffn_dim_multiplier", 1.0, above=0), fields.integer("block_multiple_of", 256)
    return int(-(-int(factor * int(2 * width / 3)) // each) * each)
