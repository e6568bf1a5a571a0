"""config.json of models for images and text -> ModelConfig. Imports no torch.

The fields of the text model are at the top level or in `text_config`; `vision_config` has the tower's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.config import ModelConfig
from moe_engine.models.config_parsers.families import parse_glm, parse_gqa, parse_qwen3_moe
from moe_engine.models.config_parsers.mixtures import parse_glm4_moe
from moe_engine.models.config_sections.fields import Fields, rope_section
from moe_engine.models.config_sections.vision import GLM4V, GLM5_NEXT, QWEN2, QWEN2_5, QWEN3, VisionConfig
from moe_engine.models.formats.fused_blocks import with_fused_experts
from moe_engine.models.formats.fused_experts import FusedExpertsFormat

QWEN2_VL_SECTIONS = (16, 24, 24)
QWEN3_VL_SECTIONS = (24, 20, 20)
GLM4V_SECTIONS = (8, 12, 12)


def parse_qwen2_vl(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Qwen2-VL: a Qwen2 text model whose rotary channels are in three sections: frame, row, column."""
    config = _qwen2_text(fields, generation)
    section = _vision(fields)
    width, out_width = section.integer("embed_dim"), section.integer("hidden_size", config.hidden_size)
    if out_width != config.hidden_size:
        section.fail("hidden_size", f"{out_width} is not hidden_size {config.hidden_size} of the text model")
    later = {"hidden_size": width, "intermediate_size": int(width * section.number("mlp_ratio", 4.0))}
    renamed = Fields({**section.raw, **later}, fields.source, "vision_config.")  # names of the later families
    vision = _common(fields, renamed, QWEN2, config.hidden_size, patch_size=14)
    activation = section.choice("hidden_act", "quick_gelu", "quick_gelu")
    return replace(_named(config, fields), vision=replace(vision, activation=activation))


def parse_qwen2_5_vl(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Qwen2.5-VL: the text model of Qwen2-VL, and a tower with windows."""
    config = _qwen2_text(fields, generation)
    section = _vision(fields)
    vision = replace(
        _common(fields, section, QWEN2_5, config.hidden_size, patch_size=14),
        window=section.integer("window_size", 112),
        full_layers=_layers(section, "fullatt_block_indexes", (7, 15, 23, 31), section.integer("depth")),
        activation=section.choice("hidden_act", "silu", "silu"),
    )
    if vision.window < vision.patch_size * vision.merge:
        section.fail("window_size", f"{vision.window} is smaller than a token of {vision.patch_size * vision.merge}")
    return replace(_named(config, fields), vision=vision)


def _qwen2_text(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    config = parse_gqa(Fields({**fields.raw, "model_type": "qwen2"}, fields.source), generation, None, ())
    sections = _sections(fields, config.rope.width // 2, QWEN2_VL_SECTIONS)
    return replace(config, rope=replace(config.rope, axes=_in_sections(sections)))


def parse_qwen3_vl(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Qwen3-VL: a Qwen3 text model whose rotary pairs take turns between frame, row and column."""
    config = parse_gqa(Fields({**fields.raw, "model_type": "qwen3"}, fields.source), generation, None, ())
    return with_qwen3_tower(fields, config)


def parse_qwen3_vl_moe(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Qwen3-VL-MoE: the same on a Qwen3-MoE text model, whose checkpoints have a layer's experts in common tensors:
    `gate_up_proj` [E, D, 2I], the gate's columns first, and `down_proj` [E, I, D]."""
    raw = {"norm_topk_prob": True, **fields.raw, "model_type": "qwen3_moe"}
    config = parse_qwen3_moe(Fields(raw, fields.source), generation)
    if config.moe is not None:
        format = with_fused_experts(config.weight_format, config.moe.num_experts, transposed=True)
        plain = FusedExpertsFormat(config.moe.num_experts, alternating=False)
        config = replace(config, weight_format=format if format.name else plain)
    return with_qwen3_tower(fields, config)


def with_qwen3_tower(
    fields: Fields,
    config: ModelConfig,
    sections: tuple[int, int, int] = QWEN3_VL_SECTIONS,
    deepstack: tuple[int, ...] = (8, 16, 24),
) -> ModelConfig:
    """A text model with the tower of Qwen3-VL. `sections`, `deepstack`: values of absent fields."""
    section, half = _vision(fields), config.rope.width // 2
    sections, layers = _sections(fields, half, sections), section.integer("depth")
    axes = _in_turns(sections)
    deepstack = _layers(section, "deepstack_visual_indexes", deepstack, layers)
    if len(deepstack) > config.num_layers or sorted(set(deepstack)) != list(deepstack):
        section.fail("deepstack_visual_indexes", f"{list(deepstack)} must ascend, at most {config.num_layers} layers")
    positions = section.integer("num_position_embeddings", 2304)
    if int(positions**0.5) ** 2 != positions:
        section.fail("num_position_embeddings", f"{positions} is no square")
    vision = replace(
        _common(fields, section, QWEN3, config.hidden_size, patch_size=16),
        num_positions=positions,
        deepstack_layers=deepstack,
        activation=section.choice("hidden_act", "gelu_pytorch_tanh", "gelu_pytorch_tanh"),
    )
    return replace(_named(config, fields), rope=replace(config.rope, axes=axes), vision=vision)


def parse_glm4v(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """GLM-4.1V and GLM-4.6V-Flash: the text model of GLM-4-0414, whose rotary channels are in three sections."""
    raw = {"partial_rotary_factor": 1.0, **fields.raw, "model_type": "glm4", "attention_bias": True}
    return _with_glm4v_tower(fields, parse_glm(Fields(raw, fields.source), generation))


def parse_glm4v_moe(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """GLM-4.5V and GLM-4.6V: the text model of GLM-4.5-Air with such sections."""
    raw = {**fields.raw, "model_type": "glm4_moe", "use_qk_norm": False}
    return _with_glm4v_tower(fields, parse_glm4_moe(Fields(raw, fields.source), generation))


def _with_glm4v_tower(fields: Fields, config: ModelConfig) -> ModelConfig:
    """The width inside the tower's MLPs is that of the text model; `intermediate_size` is the projector's."""
    section, axes = _vision(fields), _in_sections(_sections(fields, config.rope.width // 2, GLM4V_SECTIONS))
    common = _common(fields, section, GLM4V, config.hidden_size, patch_size=14)
    rope = section.section("rope_parameters") or Fields({}, fields.source, "vision_config.rope_parameters.")
    vision = replace(
        common,
        intermediate=common.out_width,
        projector_width=common.intermediate,
        num_positions=(section.integer("image_size", 336) // common.patch_size) ** 2,
        norm_eps=section.number("rms_norm_eps", 1e-5, above=0),
        theta=rope.number("rope_theta", 10000.0, above=0),
        activation=section.choice("hidden_act", "silu", "silu"),
        bias=section.flag("attention_bias"),
        projector_eps=1e-5,
    )
    if not vision.num_positions:
        section.fail("image_size", f"is smaller than patch_size {vision.patch_size}")
    config = replace(config, num_nextn_predict_layers=0)  # transformers leaves out such layers
    return replace(_named(config, fields), rope=replace(config.rope, axes=axes), vision=vision)


def glm5_next_vision(fields: Fields, out_width: int) -> VisionConfig | None:
    """The tower of GLM-5.3-Flash; None: the file has none."""
    section = fields.section("vision_config")
    if section is None:
        return None
    rope = section.section("rope_parameters") or Fields({}, fields.source, "vision_config.rope_parameters.")
    return replace(
        _common(fields, section, GLM5_NEXT, out_width, patch_size=14),
        norm_eps=section.number("rms_norm_eps", 1e-5),
        theta=rope.number("rope_theta", 10000.0),
        activation=section.choice("hidden_act", "silu", "silu"),
        limit=section.number("swiglu_limit", 10.0, above=0),
        bias=section.flag("attention_bias", True),
        projector_eps=1e-5,
        projector_width=section.integer("projection_intermediate_size", 10240),
    )


def _common(fields: Fields, section: Fields, tower: str, hidden: int, patch_size: int) -> VisionConfig:
    width, heads = section.integer("hidden_size"), section.integer("num_heads")
    if width % heads or (width // heads) % 4:
        section.fail("num_heads", f"{heads} does not divide hidden_size {width} into heads of a multiple of 4 channels")
    out_width = section.integer("out_hidden_size", hidden)
    if out_width != hidden:
        section.fail("out_hidden_size", f"{out_width} is not hidden_size {hidden} of the text model")
    channels = section.integer("in_channels", None) or section.integer("in_chans", 3)
    return VisionConfig(
        tower=tower,
        width=width,
        num_layers=section.integer("depth"),
        num_heads=heads,
        intermediate=section.integer("intermediate_size"),
        patch_size=section.integer("patch_size", patch_size),
        temporal_patch_size=section.integer("temporal_patch_size", 2),
        channels=channels,
        merge=section.integer("spatial_merge_size", 2),
        out_width=out_width,
        image_token=fields.integer("image_token_id", minimum=0),
        video_token=fields.integer("video_token_id", None, minimum=0),
    )


def _vision(fields: Fields) -> Fields:
    section = fields.section("vision_config")
    if section is None:
        fields.fail("vision_config", "is missing; the architecture has a vision tower")
    return section


def _sections(fields: Fields, half: int, default: tuple[int, int, int]) -> tuple[int, int, int]:
    """`mrope_section`: rotary pairs of the frame, the row and the column."""
    section = rope_section(fields)
    found = list(default) if section is None else section.raw.get("mrope_section") or list(default)
    counts = isinstance(found, list) and len(found) == 3 and all(isinstance(n, int) and n >= 0 for n in found)
    if not counts or sum(found) != half:
        (section or fields).fail("mrope_section", f"needs three counts with the sum {half}, found {found!r}")
    return found[0], found[1], found[2]


def _in_sections(sections: tuple[int, int, int]) -> tuple[int, ...]:
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def _in_turns(sections: tuple[int, int, int]) -> tuple[int, ...]:
    """Pairs that a section would have after the last one stay the frame's, as in transformers."""
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[pair] = axis
    return tuple(axes)


def rotary_axes(fields: Fields, half: int) -> tuple[int, ...]:
    """`RopeConfig.axes` of a draft head, whose config.json has `mrope_section` if it was trained with several axes."""
    section = rope_section(fields)
    if section is None or not section.has("mrope_section"):
        return ()
    sections = _sections(fields, half, (0, 0, 0))
    return _in_turns(sections) if section.flag("mrope_interleaved") else _in_sections(sections)


def _layers(section: Fields, name: str, default: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Layer numbers; without the field the default layers that exist in the tower."""
    found = section.raw.get(name)
    if found is None:
        return tuple(i for i in default if i < num_layers)
    if not isinstance(found, list) or not all(isinstance(i, int) and 0 <= i < num_layers for i in found):
        section.fail(name, f"needs numbers of the {num_layers} layers, found {found!r}")
    return tuple(found)


def _named(config: ModelConfig, fields: Fields) -> ModelConfig:
    """The config with the file's model_type and fields."""
    return replace(config, model_type=fields.text("model_type", ""), raw=fields.raw)
