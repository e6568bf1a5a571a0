"""config.json of dense families that differ from Llama in norms or positions -> ModelConfig: OLMo 2 and 3,
SmolLM3, EXAONE 4. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.config import GQAConfig, ModelConfig, OtherLayers
from moe_engine.models.config_parsers.families import FULL, WINDOWED, parse_gqa, with_other_windows, with_window_layers
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.config_sections.residual import ResultNorms

AFTER = ResultNorms(before_attention="", before_feed_forward="", of_feed_forward="post_feedforward_layernorm")
"""Results are normed, and the residual is not."""


def parse_olmo2(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """OLMo 2: norms of results instead of norms of the residual, norms of q and k over the whole projection."""
    return replace(parse_gqa(fields, generation, None, (), qk_norm="projection"), result_norms=AFTER)


def parse_olmo3(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """OLMo 3: OLMo 2 with windows in three of four layers, whose positions are not scaled."""
    read = olmo3_fields(fields)
    config = replace(parse_olmo2(read, generation), raw=fields.raw)
    if not config.windows:
        return config
    section = fields.section("rope_parameters")
    own = None if section is None else section.section(WINDOWED)
    rope = {"rope_theta": read.number("rope_theta", above=0)} if own is None else own.raw
    return with_other_windows(config, read, rope)


def olmo3_fields(fields: Fields) -> Fields:
    """The fields with transformers' defaults; `rope_scaling` has the settings of layers without a window."""
    raw, section = dict(fields.raw), fields.section("rope_parameters")
    if section is not None and (own := section.section(FULL)) is not None:
        raw["rope_scaling"] = {**own.raw, **(fields.raw.get("rope_scaling") or {})}
    return with_window_layers(Fields(raw, fields.source), 4)


def parse_exaone4(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """EXAONE 4: norms of results instead of norms of the residual, norms of q and k by head; with windows in three of
    four layers, whose other layers have no positions, or without windows (1.2B)."""
    read = exaone4_fields(fields)
    config = parse_gqa(read, generation, None, (), qk_norm="head", qkv_bias=False, o_bias=False)
    config = replace(config, result_norms=AFTER, raw=fields.raw)
    if not read.has("sliding_window"):
        return config
    return without_positions(config, (i for i, kind in enumerate(read.raw["layer_types"]) if kind == FULL))


def exaone4_fields(fields: Fields) -> Fields:
    """The fields with transformers' default of `layer_types`."""
    if not fields.has("sliding_window"):
        return fields
    return with_window_layers(fields, 1 if fields.has("layer_types") else fields.integer("sliding_window_pattern", 4))


def parse_smollm3(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """SmolLM3: Llama without positions in every fourth layer."""
    layers, every = fields.integer("num_hidden_layers"), fields.integer("no_rope_layer_interval", 4)
    rotary = fields.by_layer("no_rope_layers", layers, (0, 1)) or [int((i + 1) % every != 0) for i in range(layers)]
    windowed = fields.flag("use_sliding_window")
    kinds = fields.raw.get("layer_types") or [FULL if each or not windowed else WINDOWED for each in rotary]
    read = Fields({**fields.raw, "layer_types": kinds, "use_sliding_window": True}, fields.source)
    config = parse_gqa(read, generation, None, ())
    return without_positions(replace(config, raw=fields.raw), (i for i, each in enumerate(rotary) if not each))


def without_positions(config: ModelConfig, layers: Iterable[int]) -> ModelConfig:
    """The model, with layers that have no positions."""
    attention, still = config.attention, tuple(layers)
    assert isinstance(attention, GQAConfig)
    others = OtherLayers(still, attention, config.rope.still(attention.head_dim))
    return replace(config, other_layers=others) if still else config
