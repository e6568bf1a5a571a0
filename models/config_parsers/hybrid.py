"""config.json of the families with a state for each request in addition to attention -> ModelConfig. Imports no torch.

Parsers as in `config_families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.config import ModelConfig
from moe_engine.models.config_parsers.families import parse_gqa, plain_experts, qwen_moe_layers
from moe_engine.models.config_parsers.vision import with_qwen3_tower
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.config_sections.moe import MoEConfig
from moe_engine.models.config_sections.state import DeltaConfig
from moe_engine.models.formats.fused_blocks import common_experts

_LINEAR, _FULL = "linear_attention", "full_attention"


def parse_qwen3_next(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Qwen3-Next: three gated delta nets for each layer of gated attention, a shared expert with a gate, norms whose
    weights are stored minus 1, an MTP layer."""
    mtp = fields.integer("num_nextn_predict_layers", 1, minimum=0)
    delta = _delta(fields, joined=fields.flag("linear_joined", True))  # of GGUF files: false
    return _hybrid(fields, generation, _experts(fields), qwen_moe_layers(fields), delta, mtp)


def parse_qwen3_5(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Qwen3.5: Qwen3-Next's layers with dense MLPs, input projections of delta nets in four tensors, and Qwen3-VL's
    tower without deepstack; without `vision_config` the text model alone."""
    layers = fields.integer("num_hidden_layers")
    return _qwen3_5(fields, generation, None, (False,) * layers)


def parse_qwen3_5_moe(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Qwen3.5-MoE: the same with experts in every layer, in common tensors or one by one."""
    moe, layers = _experts(fields), fields.integer("num_hidden_layers")
    raw = {**fields.raw, "intermediate_size": moe.width}  # no layer is dense
    config = _qwen3_5(Fields(raw, fields.source), generation, moe, (True,) * layers)
    return replace(config, weight_format=common_experts(config.weight_format, moe.num_experts), raw=fields.raw)


def _qwen3_5(
    fields: Fields, generation: Mapping[str, Any], moe: MoEConfig | None, moe_layers: tuple[bool, ...]
) -> ModelConfig:
    mtp = fields.integer("mtp_num_hidden_layers", None, minimum=0)
    if mtp is None:
        mtp = fields.integer("num_nextn_predict_layers", 1, minimum=0)
    config = _hybrid(fields, generation, moe, moe_layers, _delta(fields, joined=False), mtp)
    has_tower = fields.has("vision_config") and config.architecture.endswith("ForConditionalGeneration")
    return with_qwen3_tower(fields, config, sections=(11, 11, 10), deepstack=()) if has_tower else config


def _experts(fields: Fields) -> MoEConfig:
    return plain_experts(
        fields, "num_experts", "moe_intermediate_size", renormalize=fields.flag("norm_topk_prob", True),
        shared_width=fields.integer("shared_expert_intermediate_size", 0, minimum=0), shared_gate=True,
    )  # fmt: skip


def _hybrid(
    fields: Fields,
    generation: Mapping[str, Any],
    moe: MoEConfig | None,
    moe_layers: tuple[bool, ...],
    delta: DeltaConfig,
    num_mtp_layers: int,
) -> ModelConfig:
    read = Fields({**fields.raw, "head_dim": fields.integer("head_dim", 256)}, fields.source)
    config = parse_gqa(read, generation, moe, moe_layers, partial_rotary=0.25, qk_norm="head", output_gate=True)
    states = tuple(i for i, kind in enumerate(_kinds(fields, config.num_layers)) if kind == _LINEAR)
    return replace(
        config,
        delta=delta,
        state_groups=delta.state_groups(states),
        norm_plus=fields.number("norm_plus", 1.0),  # of GGUF files: 0
        num_nextn_predict_layers=num_mtp_layers,
        raw=fields.raw,
    )


def _kinds(fields: Fields, layers: int) -> list[str]:
    """The kind of each layer."""
    kinds = fields.by_layer("layer_types", layers, (_LINEAR, _FULL))
    if kinds is None:
        interval = fields.integer("full_attention_interval", 4)
        return [_FULL if (i + 1) % interval == 0 else _LINEAR for i in range(layers)]
    return kinds


def _delta(fields: Fields, joined: bool) -> DeltaConfig:
    delta = DeltaConfig(
        key_heads=fields.integer("linear_num_key_heads"),
        value_heads=fields.integer("linear_num_value_heads"),
        key=fields.integer("linear_key_head_dim"),
        value=fields.integer("linear_value_head_dim"),
        taps=fields.integer("linear_conv_kernel_dim", minimum=2),
        joined=joined,
    )
    if delta.value_heads % delta.key_heads:
        fields.fail(
            "linear_num_value_heads", f"{delta.value_heads} is not a multiple of linear_num_key_heads {delta.key_heads}"
        )
    return delta
