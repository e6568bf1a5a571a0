"""config.json of Mistral's families -> ModelConfig: Ministral 3, Mistral Small 4 and Large 3, alone or as the text
model of `Mistral3ForConditionalGeneration`, which has Pixtral's vision tower; Pixtral 12B in Llava's layout. Imports no
torch.

In all text models a query is multiplied by a factor that grows with its position (`RopeConfig.query_beta`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_engine.models.checkpoint_names.mistral_native import NATIVE, PARAMS_FILE
from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.config_parsers.families import parse_deepseek, parse_dense, parse_gqa
from moe_engine.models.config_sections.fields import Fields, added_tokens, check_heads, rope_section
from moe_engine.models.config_sections.moe import MoEConfig
from moe_engine.models.config_sections.vision import PIXTRAL, PIXTRAL_12B, PIXTRAL_NATIVE, VisionConfig
from moe_engine.models.formats.float8 import Float8
from moe_engine.models.formats.fused_blocks import with_fused_experts
from moe_engine.models.formats.fused_experts import FusedExpertsFormat
from moe_engine.models.formats.fused_float8 import FusedFloat8
from moe_engine.models.formats.module_rules import Modules
from moe_engine.models.formats.protocol import WeightFormat
from moe_engine.models.formats.schemes import SchemeFormat

_LLAVA = {
    "multimodal_projector_bias": True, "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
    "spatial_merge_size": 1, "image_token_index": 32000,
}  # fmt: skip
"""Values of fields that a config.json of Llava leaves out."""
_LLAVA_TEXTS = ("llama", "mistral", "qwen2")


def parse_ministral3(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Ministral 3 (3B, 8B, 14B)."""
    return _scaled(parse_gqa(fields, generation, None, ()), fields)


def parse_mistral4(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Mistral Small 4: experts in common tensors."""
    config, moe = latent_mixture(fields, generation)
    if config.weight_format.name:
        return replace(config, weight_format=_with_fused_experts(config.weight_format, moe.num_experts))
    fused = FusedExpertsFormat(moe.num_experts, alternating=False, transposed=False, optional=True)
    return replace(config, weight_format=fused)


def parse_mistral_large3(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Mistral Large 3 and Small 4 in Mistral's own files: each expert has matrices of its own, and the norms of both
    latents have the model's epsilon."""
    config, _ = latent_mixture(fields, generation)
    assert isinstance(config.attention, MLAConfig)
    return replace(config, attention=replace(config.attention, latent_eps=config.norm_eps))


def parse_native_pixtral(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """`parse_mistral_large3` with Pixtral's tower under Mistral's names."""
    config, section = parse_mistral_large3(fields, generation), fields.section("vision_config")
    if section is None or section.raw.get("model_type") != NATIVE:
        fields.fail("vision_config", f"is served from {PARAMS_FILE} only; give the folder of Mistral's own files")
    first, last = section.raw["row_ends"]
    tower = replace(tower_of(fields, section, config), tower=PIXTRAL_NATIVE, row_ends=(first, last), projector_eps=1e-5)
    return replace(config, vision=tower)


def latent_mixture(fields: Fields, generation: Mapping[str, Any]) -> tuple[ModelConfig, MoEConfig]:
    """DeepSeek's attention, a softmax router without a bias, which may choose groups of experts."""
    raw = {"topk_method": "noaux_tc", "scoring_func": "softmax"}
    config = parse_deepseek(Fields({**fields.raw, **raw}, fields.source), generation)
    if config.moe is None:
        fields.fail("n_routed_experts", "is missing; add it, or pass it with --json-model-override-args")
    moe = replace(config.moe, has_bias=False)
    return _scaled(replace(config, moe=moe, raw=fields.raw), fields), moe


def _with_fused_experts(format: WeightFormat, num_experts: int) -> WeightFormat:
    """FP8: the experts of a layer are in common tensors, as published with a scale per matrix."""
    if not isinstance(format, SchemeFormat) or all(not isinstance(scheme, Float8) for _, scheme in format.rules):
        return with_fused_experts(format, num_experts, transposed=False)
    experts = (Modules(parts=("*.experts.*",)), FusedFloat8(num_experts))
    return replace(format, rules=(experts, *format.rules))


def parse_mistral3(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """A text model (`text_config`) with Pixtral's tower; without `vision_config` the text model alone."""
    parsers = {"mistral": parse_dense, "ministral3": parse_ministral3, "mistral4": parse_mistral4}
    kind = fields.text("model_type", "")
    if kind not in parsers:
        fields.fail("text_config.model_type", f"{kind!r} is not supported; supported: {', '.join(parsers)}")
    config, section = parsers[kind](fields, generation), fields.section("vision_config")
    if section is None or section.text("model_type", "pixtral") != "pixtral":
        return config
    return replace(config, vision=tower_of(fields, section, config))


def parse_llava(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Pixtral 12B: Mistral's text model with a token for each patch. With another tower the text model alone."""
    kind, section = fields.text("model_type", "llama"), fields.section("vision_config")
    if kind not in _LLAVA_TEXTS:
        fields.fail("text_config.model_type", f"{kind!r} is not supported; supported: {', '.join(_LLAVA_TEXTS)}")
    config = parse_dense(fields, generation)
    if section is None or section.text("model_type", "") != "pixtral":
        return config
    outer = Fields({**_LLAVA, **fields.raw}, fields.source)
    outer.check_served({"vision_feature_select_strategy": "full"})
    return replace(config, vision=replace(tower_of(outer, section, config), tower=PIXTRAL_12B, merge=1))


def tower_of(fields: Fields, section: Fields, config: ModelConfig) -> VisionConfig:
    width, heads = section.integer("hidden_size", 1024), section.integer("num_attention_heads", 16)
    check_heads(section, "num_attention_heads", heads, width)
    fields.check_served({"vision_feature_layer": (-1, [-1]), "projector_hidden_act": "gelu"})
    activation = section.choice("hidden_act", "gelu", "silu", "gelu")
    rotary = section.section("rope_parameters") or section
    image_token = fields.integer("image_token_index" if fields.has("image_token_index") else "image_token_id", 10)
    return VisionConfig(
        tower=PIXTRAL,
        width=width,
        num_layers=section.integer("num_hidden_layers", 24),
        num_heads=heads,
        intermediate=section.integer("intermediate_size", 4096),
        patch_size=section.integer("patch_size", 16),
        temporal_patch_size=1,
        channels=section.integer("num_channels", 3),
        merge=fields.integer("spatial_merge_size", 2),
        out_width=config.hidden_size,
        image_token=image_token,
        video_token=None,
        norm_eps=1e-5,
        theta=rotary.number("rope_theta", 10000.0, above=0),
        activation=activation,
        projector_eps=config.norm_eps,
        projector_bias=fields.flag("multimodal_projector_bias"),
        row_ends=_row_ends(Path(fields.source).parent, image_token),
    )


def _row_ends(folder: Path, image_token: int) -> tuple[int, int]:
    """Ids of the tokens after a row of an image and after the image. Without a tokenizer those at the distance from
    the image token that published vocabularies have."""
    found = added_tokens(folder, ("[IMG_BREAK]", "[IMG_END]"))
    return found.get("[IMG_BREAK]", image_token + 2), found.get("[IMG_END]", image_token + 3)


def _scaled(config: ModelConfig, fields: Fields) -> ModelConfig:
    """The config with `llama_4_scaling_beta` of the rotary fields."""
    section = rope_section(fields)
    beta = None if section is None else section.number("llama_4_scaling_beta", None)
    if section is None or not beta:
        return replace(config, raw=fields.raw)
    original = section.integer("original_max_position_embeddings")
    rope = replace(config.rope, query_beta=beta, original_max_position=original)
    return replace(config, rope=rope, raw=fields.raw)
