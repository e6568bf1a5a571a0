"""config.json of Llama 4 (Scout, Maverick) -> ModelConfig. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_engine.kernels.attention_windows import ChunkWindow
from moe_engine.models.config import GQAConfig, ModelConfig, OtherLayers
from moe_engine.models.config_parsers.families import check_moe, parse_gqa
from moe_engine.models.config_sections.fields import Fields, added_tokens, check_heads
from moe_engine.models.config_sections.moe import MoEConfig
from moe_engine.models.config_sections.vision import LLAMA4, VisionConfig
from moe_engine.models.formats.fp4 import FP4
from moe_engine.models.formats.fused_blocks import with_fused_experts
from moe_engine.models.formats.fused_experts import FusedExpertsFormat
from moe_engine.models.formats.fused_float8 import FusedFloat8
from moe_engine.models.formats.fused_fp4 import FusedNVFP4
from moe_engine.models.formats.module_rules import Modules
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.formats.schemes import Scheme, SchemeFormat

_CHUNKED, _FULL = "chunked_attention", "full_attention"


def parse_llama4(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Llama 4: chunks with positions in three of four layers; the others see all tokens, without positions, and scale
    queries by their place. The sigmoid of the router's choice multiplies the input of the expert, not its result."""
    fields.check_served({"num_experts_per_tok": 1})
    read = llama4_fields(fields)
    width = fields.integer("intermediate_size")
    moe = MoEConfig(
        num_experts=read.integer("num_local_experts"),
        top_k=1,
        width=width,
        shared_width=width,
        score="sigmoid",
        scales_input=True,
    )
    check_moe(fields, moe)
    sparse = tuple(kind == "sparse" for kind in read.raw["mlp_layer_types"])
    inner = Fields({**read.raw, "intermediate_size": read.integer("intermediate_size_mlp")}, fields.source)
    config = parse_gqa(inner, generation, moe, sparse, interleaved=True)
    whole, rope = config.attention, config.rope
    assert isinstance(whole, GQAConfig)
    rotary = tuple(i for i, kind in enumerate(read.raw["layer_types"]) if kind == _CHUNKED)
    normed = replace(whole, qk_norm="unweighted" if read.flag("use_qk_norm", True) else "")
    if normed.qk_norm:  # which after the rotation takes its factor away, but for the part of the epsilon
        normed = replace(normed, qk_eps=config.norm_eps / rope.attention_factor**2)
        rope = replace(rope, attention_factor=1.0)
    still = rope.still(whole.head_dim)
    if fields.raw.get("attn_temperature_tuning", True):  # true, or a number
        floor, scale = read.integer("floor_scale"), read.number("attn_scale")
        still = replace(still, query_beta=scale, query_start=1, original_max_position=floor)
    chunk = ChunkWindow(fields.integer("attention_chunk_size", None) or 0)
    if not chunk:
        fields.fail("attention_chunk_size", "is null; give the tokens of a chunk")
    windows = tuple(chunk if i in rotary else None for i in range(config.num_layers))
    others = OtherLayers(rotary, normed, rope) if rotary else None
    section = fields.section("vision_config")
    return replace(
        config,
        rope=still,
        other_layers=others,
        windows=windows if any(windows) else (),
        weight_format=_with_joined_experts(config, moe.num_experts),
        raw=fields.raw,
        vision=None if section is None else _tower(fields, section, config.hidden_size),
    )


def _tower(fields: Fields, section: Fields, out_width: int) -> VisionConfig:
    """The tower with its projector. A prompt has an `<|image|>` for each image."""
    section.check_served({"hidden_act": "gelu", "vision_feature_select_strategy": "default"})
    section.check_served({"multi_modal_projector_bias": False})
    width, heads = section.integer("hidden_size", 768), section.integer("num_attention_heads", 16)
    check_heads(section, "num_attention_heads", heads, width)
    size, patch = section.integer("image_size", 448), section.integer("patch_size", 14)
    ratio = section.number("pixel_shuffle_ratio", 0.5, above=0)
    merge = round(1 / ratio)
    if size % (patch * merge) or merge * ratio != 1:
        section.fail("image_size", f"{size} has no whole tokens: patches of {patch}, pixel_shuffle_ratio {ratio:g}")
    inner, middle = section.integer("projector_input_dim", 4096), section.integer("intermediate_size", 5632)
    section.check_served({"projector_output_dim": inner, "vision_output_dim": inner})
    if middle != width * merge**2:
        section.fail("intermediate_size", f"{middle} is not the width {width * merge**2} of the patches of a token")
    token = fields.integer("image_token_index" if fields.has("image_token_index") else "image_token_id", 200092)
    names = ("<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>")
    found = added_tokens(Path(fields.source).parent, names)
    between, behind, image = (found.get(name, token - less) for name, less in zip(names, (8, 7, 2)))
    start, end = fields.integer("boi_token_index", 200080), fields.integer("eoi_token_index", 200081)
    return VisionConfig(
        tower=LLAMA4,
        width=width,
        num_layers=section.integer("num_hidden_layers", 34),
        num_heads=heads,
        intermediate=middle,
        patch_size=patch,
        temporal_patch_size=1,
        channels=section.integer("num_channels", 3),
        merge=merge,
        out_width=out_width,
        image_token=image,
        video_token=token,  # a prompt has none of its own
        num_positions=(size // patch) ** 2 + 1,
        norm_eps=1e-5,
        theta=(section.section("rope_parameters") or section).number("rope_theta", 10000.0, above=0),
        activation="gelu",
        projector_width=inner,
        around=(start, end),
        tile=size // patch,
        tile_marks=(between, behind, image),
    )


def _with_joined_experts(config: ModelConfig, num_experts: int) -> Any:
    """The format; experts of a layer are in common tensors, or have a matrix each: unquantized, and ModelOpt's FP8 and
    NVFP4, which are dequantized if they have a matrix each."""
    if config.weight_format == PLAIN:
        return FusedExpertsFormat(num_experts, alternating=False, optional=True)
    format = config.weight_format
    if isinstance(format, SchemeFormat) and format.name == "modelopt":
        scheme = format.rules[0][1]  # of every linear layer
        common: Scheme = FusedFloat8(num_experts, transposed=True)
        if isinstance(scheme, FP4):
            common = FusedNVFP4(**vars(scheme), num_experts=num_experts)
        return replace(format, rules=((Modules(parts=("*.experts.*",)), common), *format.rules))
    return with_fused_experts(format, num_experts, transposed=True)


def llama4_fields(fields: Fields) -> Fields:
    """The fields with transformers' defaults; layers by `layer_types` and `mlp_layer_types`."""
    raw: dict[str, Any] = {
        "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "num_local_experts": 16,
        "intermediate_size_mlp": 16384, "floor_scale": 8192, "attn_scale": 0.1, "max_position_embeddings": 131072,
        **fields.present(), "num_experts_per_tok": 1,
    }  # fmt: skip
    layers = fields.integer("num_hidden_layers")
    every, step = fields.integer("no_rope_layer_interval", 4), fields.integer("interleave_moe_layer_step", 1)
    rotary = fields.raw.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
    if not isinstance(rotary, list) or len(rotary) < layers or any(each not in (0, 1) for each in rotary):
        fields.fail("no_rope_layers", f"needs a 1 (with positions) or 0 for each of {layers} layers, not {rotary!r}")
    kinds = [_CHUNKED if each else _FULL for each in rotary[:layers]]
    given = fields.raw.get("layer_types") or kinds
    if given != kinds:
        fields.fail("layer_types", f"must have {_CHUNKED} where no_rope_layers has 1, found {given!r}")
    sparse = fields.raw.get("moe_layers")
    if sparse is None:
        sparse = list(range(step - 1, layers, step))
    if not isinstance(sparse, list) or not all(isinstance(i, int) for i in sparse):
        fields.fail("moe_layers", f"must be a list of layers, found {sparse!r}")
    raw |= {"layer_types": kinds, "mlp_layer_types": ["sparse" if i in sparse else "dense" for i in range(layers)]}
    return Fields(raw, fields.source)


def llama4_facts(fields: Fields) -> Fields:
    """The fields under the names of other families, for the planner."""
    raw = dict(llama4_fields(fields).raw)
    raw |= {
        "layer_types": ["sliding_attention" if kind == _CHUNKED else kind for kind in raw["layer_types"]],
        "sliding_window": fields.integer("attention_chunk_size"), "n_shared_experts": 1,
        "moe_intermediate_size": fields.integer("intermediate_size"), "intermediate_size": raw["intermediate_size_mlp"],
    }  # fmt: skip
    return Fields(raw, fields.source)
