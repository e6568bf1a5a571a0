"""config.json of MiMo-V2-Flash and of MiMo-7B -> ModelConfig. Imports no torch.

In MiMo-V2-Flash layers with a window have more KV heads, sinks, and a rotary base of their own. The published file and
transformers' name the kinds of layers differently; `mimo_fields` reads both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.config import GQAConfig, ModelConfig
from moe_engine.models.config_parsers.families import (
    deepseek_moe_layers,
    parse_deepseek_moe,
    parse_gqa,
    with_other_windows,
)
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.config_sections.mtp import MTPForm
from moe_engine.models.formats.block_fp8 import BlockFP8Format
from moe_engine.models.formats.joined_groups import JoinedGroupsFormat

_FULL, _WINDOW = "full_attention", "sliding_attention"
_PUBLISHED = {
    "layer_types": ("hybrid_layer_pattern", (_FULL, _WINDOW)),
    "mlp_layer_types": ("moe_layer_freq", ("dense", "sparse")),
}
"""transformers' field, and the published one with the names of its numbers 0 and 1."""
_THETAS = {_FULL: ("rope_theta", 5_000_000.0), _WINDOW: ("swa_rope_theta", 10_000.0)}
_JOINED = "fused_qkv"
_ALIKE = ("num_attention_heads", "head_dim", "v_head_dim")
"""Fields whose values for layers with a window (``swa_``) must be those of the other layers."""


def parse_mimo(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """MiMo-7B: Qwen2's layers, and an MTP layer that reads the residual before the final norm."""
    config = parse_gqa(fields, generation, None, (), qkv_bias=fields.flag("attention_bias", True), o_bias=False)
    return replace(config, mtp=MTPForm(reads_residual=True, hidden_first=True))


def parse_mimo_v2_flash(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """MiMo-V2-Flash, and the text of MiMo-V2.5: windows in five of six layers, values narrower than keys and multiplied
    by a constant, DeepSeek V3's router without shared experts. MTP layers are not served."""
    read = mimo_fields(fields)
    _refuse_other(read)
    moe = parse_deepseek_moe(read)
    scale = 1.0 if "attention_value_scale" in read.raw else 0.707  # null: none
    config = parse_gqa(
        read,
        generation,
        moe,
        deepseek_moe_layers(read, moe),
        qkv_bias=read.flag("attention_bias"),
        o_bias=False,
        sinks=read.flag("add_full_attention_sink_bias"),
        v_head_dim=read.integer("v_head_dim"),
        value_scale=read.number("attention_value_scale", scale),
    )
    config = replace(config, num_nextn_predict_layers=0, raw=fields.raw)
    if not config.windows:
        return _with_joined(read, config)
    whole = config.attention
    assert isinstance(whole, GQAConfig)
    heads, sinks = read.integer("swa_num_key_value_heads"), read.flag("add_swa_attention_sink_bias", True)
    if whole.num_heads % heads:
        read.fail("swa_num_key_value_heads", f"{heads} does not divide num_attention_heads {whole.num_heads}")
    config = with_other_windows(config, read, _rope(fields, _WINDOW), num_kv_heads=heads, sinks=sinks)
    return _with_joined(read, config)


def _with_joined(fields: Fields, config: ModelConfig) -> ModelConfig:
    """The model with the format of its q, k and v (MiMo-V2.5): groups of as many KV heads as layers without a window
    have."""
    fields.check_served({"attention_projection_layout": ("split", _JOINED)})
    if fields.raw.get("attention_projection_layout") != _JOINED:
        return config
    format, groups = config.weight_format, fields.integer("num_key_value_heads")
    if type(format) is not BlockFP8Format:
        fields.fail(
            "attention_projection_layout", f"{_JOINED} is supported with quantization_config of method fp8 only"
        )
    rows = []
    for attention in map(config.attention_of, range(config.num_layers)):
        assert isinstance(attention, GQAConfig)
        if attention.num_heads % groups or attention.num_kv_heads % groups:
            fields.fail("num_key_value_heads", f"{groups} groups do not divide the heads of all layers")
        query, heads = attention.num_heads * attention.head_dim, attention.num_kv_heads
        rows.append((query, heads * attention.head_dim, heads * attention.value_width))
    own = {each.name: getattr(format, each.name) for each in dataclasses.fields(format)}
    return replace(config, weight_format=JoinedGroupsFormat(**own, groups=groups, rows=tuple(rows)))


def mimo_fields(fields: Fields) -> Fields:
    """The fields of either dialect under transformers' names, with its defaults; `sliding_window` counts the query
    token, and `rope_scaling` has the rotary settings of layers without one."""
    raw = dict(fields.raw)
    layers = fields.integer("num_hidden_layers")
    defaults = {
        "layer_types": [_FULL if i == 0 or (i + 1) % 6 == 0 else _WINDOW for i in range(layers)],
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
    }
    for name, default in defaults.items():
        raw[name] = raw.get(name) or _named(fields, *_PUBLISHED[name]) or default
    before = fields.integer("sliding_window_size", None)
    raw |= {
        "sliding_window": fields.integer("sliding_window", 129) if before is None else before + 1,
        "use_sliding_window": True,
        "rms_norm_eps": fields.number("rms_norm_eps", None) or fields.number("layernorm_epsilon", 1e-5),
        "head_dim": fields.integer("head_dim", 192),
        "v_head_dim": fields.integer("v_head_dim", 128),
        "swa_num_key_value_heads": fields.integer("swa_num_key_value_heads", 2 * fields.integer("num_key_value_heads")),
        "topk_method": fields.text("topk_method", "noaux_tc"),
        "scoring_func": fields.text("scoring_func", "sigmoid"),
        "rope_scaling": _rope(fields, _FULL),
    }
    return Fields(raw, fields.source)


def _named(fields: Fields, name: str, names: tuple[str, str]) -> list[str] | None:
    """The names of the numbers 0 and 1 in a list; None: the file has none."""
    numbers = fields.raw.get(name)
    if numbers is None:
        return None
    if not isinstance(numbers, list) or not all(number in (0, 1) for number in numbers):
        fields.fail(name, f"must be a list of 0 and 1, not {numbers!r}")
    return [names[number] for number in numbers]


def _rope(fields: Fields, kind: str) -> dict[str, Any]:
    """`rope_parameters` of a kind of layers."""
    name, theta = _THETAS[kind]
    section = fields.section("rope_parameters")
    own = None if section is None else section.section(kind)
    if own is not None:
        return {"partial_rotary_factor": 0.334, **own.raw}
    part = fields.number("partial_rotary_factor", 0.334, above=0)
    return {"rope_theta": fields.number(name, theta, above=0), "partial_rotary_factor": part}


def _refuse_other(fields: Fields) -> None:
    """Raises ConfigError for settings that no released model has."""
    for name in _ALIKE:
        if (own := fields.integer(f"swa_{name}", None)) not in (None, value := fields.integer(name)):
            fields.fail(f"swa_{name}", f"is {own}, {name} is {value}: different numbers are not supported")
    if fields.integer("v_head_dim") % 4:
        fields.fail("v_head_dim", f"{fields.integer('v_head_dim')} is not a multiple of 4")
    if fields.integer("n_shared_experts", 0, minimum=0):
        fields.fail("n_shared_experts", "is not 0: shared experts are not supported for this model")
    fields.check_served({"topk_method": "noaux_tc"})
    if (stored := fields.section("quantization_config")) is not None:
        stored.check_served({"store_dtype": "fp8"})
