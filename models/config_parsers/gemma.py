"""config.json of Gemma -> ModelConfig. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.kernels.gate_form import GELU, GELU_LIMIT
from moe_engine.models.config import GQAConfig, ModelConfig, OtherLayers
from moe_engine.models.config_parsers.families import (
    FULL,
    WINDOWED,
    parse_gqa,
    plain_experts,
    with_other_windows,
    with_window_layers,
)
from moe_engine.models.config_parsers.siglip import MODEL_TYPE, siglip_tower
from moe_engine.models.config_sections.fields import Fields, parse_rope, rope_section
from moe_engine.models.config_sections.residual import ResultNorms
from moe_engine.models.config_sections.rope import RopeConfig
from moe_engine.models.config_sections.vision import GEMMA3, VisionConfig
from moe_engine.models.formats.fused_blocks import with_fused_experts
from moe_engine.models.formats.fused_experts import FusedExpertsFormat

_SERVED = {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False}
_NORMS = ResultNorms(before_feed_forward="pre_feedforward_layernorm", of_feed_forward="post_feedforward_layernorm")
_SERVED4 = {
    "hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": "vision",
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
}  # fmt: skip
_PART = "partial_rotary_factor"
_CAP = "attn_logit_softcapping"


def parse_gemma3(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Gemma 3: windows in five of six layers, which have rotary settings of their own; norms of results; GELU."""
    fields.check_served(_SERVED)
    if fields.has(_CAP):
        fields.fail(_CAP, f"{fields.raw[_CAP]!r} is not supported; supported: null")
    read, (full, windowed) = gemma_fields(fields), _ropes(fields)
    read = Fields({**read.raw, "rope_scaling": full}, fields.source)
    config = parse_gqa(read, generation, None, (), qk_norm="head")
    if config.windows:
        config = with_other_windows(config, read, windowed)
    return _as_gemma(
        config,
        fields,
        fields.number("query_pre_attn_scalar", above=0),
        max_position_embeddings=fields.integer("max_position_embeddings"),  # with the factor of the rotary scaling
        norm_plus=fields.number("norm_plus", 1.0),  # of GGUF files: 0
        result_norms=_NORMS,
    )


def parse_gemma3_vision(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Gemma 3 with a SigLIP tower, or the text model of a file without a tower."""
    config, section = parse_gemma3(fields, generation), fields.section("vision_config")
    return config if section is None else replace(config, vision=_tower(fields, section, config.hidden_size))


def _tower(fields: Fields, section: Fields, out_width: int) -> VisionConfig:
    """The tower with its projector. A prompt has a `<start_of_image>` for each image."""
    section.check_served({"model_type": MODEL_TYPE})
    side = section.integer("image_size", 224) // section.integer("patch_size", 16)
    tokens = fields.integer("mm_tokens_per_image", 256)
    rows = int(tokens**0.5)
    if rows**2 != tokens or side % rows:
        fields.fail("mm_tokens_per_image", f"{tokens} is no square of a divisor of the {side} rows of patches")
    name = "image_token_index" if fields.has("image_token_index") else "image_token_id"
    token = fields.integer(name, 262144, minimum=0)
    tower = siglip_tower(section, GEMMA3, side, side // rows, token, out_width=out_width, width=768, layers=12)
    whole = "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"
    return replace(tower, side=side, sees_whole=True, written=("<start_of_image>", whole))


def parse_gemma2(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Gemma 2: bounded scores, windows in every second layer, norms of results, GELU."""
    fields.check_served(_SERVED)
    cap = fields.number(_CAP, 0.0, above=0)
    config = parse_gqa(gemma2_fields(fields), generation, None, (), score_cap=cap)
    return _as_gemma(
        config,
        fields,
        fields.number("query_pre_attn_scalar", above=0),
        norm_plus=fields.number("norm_plus", 1.0),  # of GGUF files: 0
        result_norms=_NORMS,
    )


def gemma2_fields(fields: Fields) -> Fields:
    """The fields with the kind of each layer, without the older name of the activation, which transformers does not
    read."""
    return with_window_layers(Fields({**fields.raw, "hidden_act": None}, fields.source), 2)


def parse_gemma4(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Gemma 4 without inputs by layer: wider heads in layers without a window, whose values may be their keys; norms
    of values, no scale of scores; experts beside an MLP."""
    fields.check_served(_SERVED4)
    read, (full, windowed) = gemma4_fields(fields), _ropes(fields)
    moe, layers = None, fields.integer("num_hidden_layers")
    if fields.flag("enable_moe_block"):
        width = fields.integer("intermediate_size")
        moe = plain_experts(
            read, "num_experts", "moe_intermediate_size", shared_width=width, renormalize=True, limit=GELU_LIMIT,
            normed=True,
        )  # fmt: skip
    shared = fields.flag("attention_k_eq_v")
    rope = {name: value for name, value in full.items() if name != _PART}
    proportional = rope.get("rope_type", "default") == "proportional"
    more = {"rope_scaling": rope | {"rope_type": "default"} if proportional else rope, "rope_parameters": None}
    own = Fields({**read.raw, **more, _PART: None}, fields.source)
    config = parse_gqa(
        own, generation, moe, (moe is not None,) * layers, qk_norm="head", value_norm=True, shared_values=shared
    )
    whole = config.attention
    assert isinstance(whole, GQAConfig)
    if proportional:
        width, settings = whole.head_dim, Fields(full, fields.source, f"rope_parameters.{FULL}.")
        turned = int(settings.number(_PART, 1.0, above=0) * width // 2)
        factor = settings.number("factor", 1.0, above=0)
        config = replace(config, rope=replace(config.rope, kind="proportional", turned=turned, factor=factor))
    if config.windows:
        sizes = {"num_kv_heads": fields.integer("num_key_value_heads"), "head_dim": fields.integer("head_dim")}
        attention = replace(whole, shared_values=False, **sizes)
        found = parse_rope(
            Fields({**own.raw, "rope_scaling": windowed}, fields.source), attention.head_dim, False, False
        )
        config = replace(config, other_layers=OtherLayers(config.windowed_layers, attention, found))
    format = config.weight_format
    if moe is not None:
        fused = FusedExpertsFormat(moe.num_experts, alternating=False, transposed=False, optional=True)
        format = with_fused_experts(format, moe.num_experts, transposed=False) if format.name else fused
    return _as_gemma(
        config,
        fields,
        1.0,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        weight_format=format,
        result_norms=_NORMS if moe is None else _NORMS._replace(before_feed_forward=""),
        layer_factors=True,
    )


def gemma4_fields(fields: Fields) -> Fields:
    """The fields with the kind of each layer, and with the heads of layers without a window; those of others have names
    with ``swa_``."""
    raw = dict(gemma_fields(fields).raw)
    kinds = raw["layer_types"] = [*raw["layer_types"][:-1], FULL]
    by_layer = fields.section("per_layer_config")  # as transformers saves it
    own = None if by_layer is None else by_layer.section(str(kinds.index(FULL)))
    raw |= {f"swa_{name}": raw.get(name) for name in ("head_dim", "num_key_value_heads")}
    if own is not None:
        raw |= own.raw
    else:
        raw["head_dim"] = fields.integer("global_head_dim", 512)
        groups = fields.integer("num_global_key_value_heads", None) if fields.flag("attention_k_eq_v") else None
        raw["num_key_value_heads"] = groups or fields.integer("num_key_value_heads")
    raw |= {"num_experts_per_tok": raw.get("top_k_experts")}
    if fields.flag("enable_moe_block"):
        raw["shared_expert_intermediate_size"] = raw.get("intermediate_size")
    return Fields(raw, fields.source)


def gemma_fields(fields: Fields) -> Fields:
    """The fields with the kind of each layer."""
    return with_window_layers(fields, fields.integer("sliding_window_pattern", 6))


def _ropes(fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary settings of layers without a window and with one, in either dialect."""
    section = rope_section(fields)
    found = {} if section is None else section.raw
    by_kind = FULL in found or WINDOWED in found
    full, windowed = (found.get(FULL) or {}, found.get(WINDOWED) or {}) if by_kind else (found, {})
    theta = fields.number("rope_theta", 1e6, above=0), fields.number("rope_local_base_freq", 1e4, above=0)
    return {"rope_theta": theta[0], **full}, {"rope_theta": theta[1], **windowed}


def _as_gemma(config: ModelConfig, fields: Fields, scale: float, **own: Any) -> ModelConfig:
    """With what all generations share, and a generation's own fields.

    Args:
        scale: scores are divided by its root.
    """
    return replace(
        _with_softmax_scale(config, scale),
        activation=GELU,
        embed_scale=config.hidden_size**0.5,
        rounds_scale=True,
        logit_cap=fields.number("final_logit_softcapping", 0.0, above=0),
        raw=fields.raw,
        **own,
    )


def _with_softmax_scale(config: ModelConfig, scalar: float) -> ModelConfig:
    """Scores are multiplied by scalar^-0.5."""

    def scaled(rope: RopeConfig, attention: Any) -> RopeConfig:
        return replace(rope, softmax_factor=(attention.head_dim / scalar) ** 0.5, max_position=0)

    others = config.other_layers
    if others is not None:
        others = replace(others, rope=scaled(others.rope, others.attention))
    return replace(config, rope=scaled(config.rope, config.attention), other_layers=others)
