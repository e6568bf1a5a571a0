"""config.json of Mistral's families since 2025 -> ModelConfig: Ministral 3 and Mistral Small 4, alone or as the text
model of `Mistral3ForConditionalGeneration`, whose vision tower is not loaded. Imports no torch.

In both a query is multiplied by a factor that grows with its position (`RopeConfig.query_beta`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.config import ModelConfig
from moe_engine.models.config_families import parse_deepseek, parse_dense, parse_gqa
from moe_engine.models.config_fields import Fields
from moe_engine.models.formats.float8 import Float8
from moe_engine.models.formats.fused_experts import FusedExpertsFormat
from moe_engine.models.formats.fused_float8 import FusedFloat8
from moe_engine.models.formats.module_rules import Modules
from moe_engine.models.formats.protocol import WeightFormat
from moe_engine.models.formats.schemes import SchemeFormat


def parse_ministral3(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Ministral 3 (3B, 8B, 14B)."""
    return _scaled(parse_gqa(fields, generation, None, ()), fields)


def parse_mistral4(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Mistral Small 4: DeepSeek's attention, a softmax router without a bias, which may choose groups of experts."""
    raw = {"topk_method": "noaux_tc", "scoring_func": "softmax"}
    config = parse_deepseek(Fields({**fields.raw, **raw}, fields.source), generation)
    moe = config.moe
    if moe is None:
        fields.fail("n_routed_experts", "is missing; add it, or pass it with --json-model-override-args")
    config = _scaled(replace(config, moe=replace(moe, has_bias=False), raw=fields.raw), fields)
    if config.weight_format.name:
        return replace(config, weight_format=_with_fused_experts(config.weight_format, moe.num_experts))
    fused = FusedExpertsFormat(moe.num_experts, alternating=False, transposed=False, optional=True)
    return replace(config, weight_format=fused)


def _with_fused_experts(format: WeightFormat, num_experts: int) -> WeightFormat:
    """FP8 with a scale per matrix, as published: the experts of a layer are in common tensors."""
    if not isinstance(format, SchemeFormat) or all(not isinstance(scheme, Float8) for _, scheme in format.rules):
        return format
    experts = (Modules(parts=("*.experts.*",)), FusedFloat8(num_experts))
    return replace(format, rules=(experts, *format.rules))


def parse_mistral3_text(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """The text model of a file with `text_config`."""
    parsers = {"mistral": parse_dense, "ministral3": parse_ministral3, "mistral4": parse_mistral4}
    kind = fields.text("model_type", "")
    if kind not in parsers:
        fields.fail("text_config.model_type", f"{kind!r} is not supported; supported: {', '.join(parsers)}")
    return parsers[kind](fields, generation)


def _scaled(config: ModelConfig, fields: Fields) -> ModelConfig:
    """The config with `llama_4_scaling_beta` of the rotary fields."""
    section = fields.section("rope_parameters") or fields.section("rope_scaling")
    beta = None if section is None else section.number("llama_4_scaling_beta", None)
    if section is None or not beta:
        return replace(config, raw=fields.raw)
    original = section.integer("original_max_position_embeddings")
    rope = replace(config.rope, query_beta=beta, original_max_position=original)
    return replace(config, rope=rope, raw=fields.raw)
