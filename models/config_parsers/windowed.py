"""config.json of mixtures with windows, whose other layers have no positions (K-EXAONE, Flint) or others (Mellum 2)
-> ModelConfig. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.config import ModelConfig
from moe_engine.models.config_parsers.dense import exaone4_fields, without_positions
from moe_engine.models.config_parsers.families import (
    FULL,
    WINDOWED,
    deepseek_moe_layers,
    parse_deepseek_moe,
    parse_gqa,
    plain_experts,
    qwen_moe_layers,
    with_other_windows,
)
from moe_engine.models.config_sections.fields import Fields

_LISTS = {"swiglu_limits": None, "sliding_windows": None}
"""Lists by layer of K-EXAONE 2.0, of which transformers has no class."""
_MELLUM_ROPE: Mapping[str, Mapping[str, Any]] = {FULL: {"rope_theta": 500000.0}, WINDOWED: {"rope_theta": 10000.0}}


def parse_exaone_moe(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """K-EXAONE: EXAONE 4's attention with norms of the residual, DeepSeek V3's router and shared expert. Its MTP layer
    is not served."""
    fields.check_served(_LISTS)
    read = exaone_moe_fields(fields)
    moe = parse_deepseek_moe(read)
    layers = deepseek_moe_layers(read, moe)
    config = parse_gqa(read, generation, moe, layers, qk_norm="head", qkv_bias=False, o_bias=False)
    config = replace(config, num_nextn_predict_layers=0, raw=fields.raw)
    return _still_without_window(config, read) if read.has("sliding_window") else config


def exaone_moe_fields(fields: Fields) -> Fields:
    """The fields under DeepSeek's names, with transformers' defaults."""
    names = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
    raw = {names.get(name, name): value for name, value in exaone4_fields(fields).raw.items()}
    return Fields(raw | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}, fields.source)


def parse_flint(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Flint: Qwen3-MoE's layers with sinks, a sigmoid router without a bias, a shared expert without a gate."""
    read = flint_fields(fields)
    moe = plain_experts(
        read, "num_experts", "moe_intermediate_size", score="sigmoid", renormalize=read.flag("norm_topk_prob", True),
        shared_width=read.integer("shared_expert_intermediate_size"),
    )  # fmt: skip
    config = parse_gqa(read, generation, moe, qwen_moe_layers(read), qk_norm="head", sinks=True)
    return replace(_still_without_window(config, read), raw=fields.raw)


def flint_fields(fields: Fields) -> Fields:
    """The fields with transformers' kinds of layers: windows but for the first two layers, each fourth and the last."""
    layers = fields.integer("num_hidden_layers")
    full = {0, 1, layers - 1, *range(1, layers, 4)}
    kinds = fields.raw.get("layer_types") or [FULL if i in full else WINDOWED for i in range(layers)]
    dense = fields.items("mlp_only_layers", 0, 1)
    own = {"layer_types": kinds, "use_sliding_window": True, "mlp_only_layers": dense}
    return Fields({**fields.raw, **own}, fields.source)


def parse_mellum(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Mellum 2: Qwen3-MoE with windows, which have a rotary embedding of their own. Its MTP layer is not served."""
    read = mellum_fields(fields)
    moe = plain_experts(read, "num_experts", "moe_intermediate_size", renormalize=read.flag("norm_topk_prob", True))
    config = parse_gqa(read, generation, moe, deepseek_moe_layers(read, moe), qk_norm="head")
    config = replace(config, num_nextn_predict_layers=0, raw=fields.raw)
    return with_other_windows(config, read, _mellum_rope(fields, WINDOWED)) if config.windows else config


def mellum_fields(fields: Fields) -> Fields:
    """The fields with transformers' defaults; `rope_scaling` has the settings of layers without a window."""
    raw = fields.present()
    raw["num_experts"] = raw.pop("num_local_experts", None) or raw.get("num_experts", 64)
    raw |= {"use_sliding_window": True, "rope_scaling": _mellum_rope(fields, FULL)}
    raw.setdefault("layer_types", [FULL] * fields.integer("num_hidden_layers"))
    raw.pop("rope_parameters", None)
    return Fields(raw, fields.source)


def _mellum_rope(fields: Fields, kind: str) -> Mapping[str, Any]:
    section = fields.section("rope_parameters")
    own = None if section is None else section.section(kind)
    return _MELLUM_ROPE[kind] if own is None else own.raw


def _still_without_window(config: ModelConfig, read: Fields) -> ModelConfig:
    return without_positions(config, (i for i, kind in enumerate(read.raw["layer_types"]) if kind == FULL))
