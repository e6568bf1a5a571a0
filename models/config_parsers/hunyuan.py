"""config.json of Tencent's Hunyuan V1 (dense, A13B) and Hy3 -> ModelConfig. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.config import ModelConfig
from moe_engine.models.config_parsers.families import check_moe, deepseek_moe_layers, parse_gqa
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.config_sections.moe import MoEConfig


def parse_hunyuan(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Hunyuan V1: q and k are normed after the rotation."""
    return _hunyuan(fields, generation, None)


def hunyuan_moe_fields(fields: Fields) -> Fields:
    """The fields with those of the mixture, which may have a value for each layer, as single numbers under the names of
    Qwen's mixtures."""
    width = fields.integer("intermediate_size")
    mixture = {
        "num_experts_per_tok": _of_all_layers(fields, "moe_topk"),
        "moe_intermediate_size": _of_all_layers(fields, "moe_intermediate_size", width),
        "shared_expert_intermediate_size": width * _of_all_layers(fields, "num_shared_expert", 1),
    }
    return Fields({**fields.raw, **mixture}, fields.source)


def parse_hunyuan_moe(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Hunyuan-A13B: the same with experts in every layer and a shared MLP."""
    mixture = hunyuan_moe_fields(fields)
    moe = MoEConfig(
        num_experts=fields.integer("num_experts"),
        top_k=mixture.integer("num_experts_per_tok"),
        width=mixture.integer("moe_intermediate_size"),
        shared_width=mixture.integer("shared_expert_intermediate_size", minimum=0),
        score="softmax",
        renormalize=True,
    )
    check_moe(fields, moe)
    if skipped := fields.integer("moe_layer_num_skipped", 0, minimum=0):
        fields.fail("moe_layer_num_skipped", f"{skipped}: dense layers before the mixtures are not supported")
    return _hunyuan(fields, generation, moe)


def _hunyuan(fields: Fields, generation: Mapping[str, Any], moe: MoEConfig | None) -> ModelConfig:
    if fields.flag("use_cla"):
        fields.fail("use_cla", "is true: keys and values of another layer are not supported")
    read = Fields({"head_dim": fields.integer("attention_head_dim", None)} | fields.present(), fields.source)
    layers = (moe is not None,) * fields.integer("num_hidden_layers")
    norm = "rotated" if fields.flag("use_qk_norm", True) else ""
    return replace(parse_gqa(read, generation, moe, layers, qk_norm=norm), raw=fields.raw)


def parse_hy_v3(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Hy3: norms of q and k before the rotation, a sigmoid router with a bias, a shared expert, MTP layers."""
    if not fields.flag("moe_router_use_sigmoid", True) or fields.flag("mlp_bias"):
        fields.fail("moe_router_use_sigmoid, mlp_bias", "must be true and false; other values are not supported")
    width = fields.integer("moe_intermediate_size")
    moe = MoEConfig(
        num_experts=fields.integer("num_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        width=width,
        shared_width=width * fields.integer("num_shared_experts", 1, minimum=0),
        score="sigmoid",
        has_bias=fields.flag("moe_router_enable_expert_bias", True),
        renormalize=fields.flag("route_norm", True),
        scale=fields.number("router_scaling_factor", 1.0, above=0),
    )
    check_moe(fields, moe)
    norm = "head" if fields.flag("qk_norm", True) else ""
    return parse_gqa(fields, generation, moe, deepseek_moe_layers(fields, moe), qk_norm=norm)


def _of_all_layers(fields: Fields, name: str, default: int | None = None) -> int:
    """A number, or a list with the same number for each layer."""
    found = fields.raw.get(name)
    if isinstance(found, list):
        layers = fields.integer("num_hidden_layers")
        if len(found) < layers or len(set(found[:layers])) != 1:
            fields.fail(name, f"needs the same value for each of {layers} layers, found {found!r}")
        return int(Fields({name: found[0]}, fields.source).integer(name))
    return int(fields.integer(name) if default is None else fields.integer(name, default, minimum=0))
