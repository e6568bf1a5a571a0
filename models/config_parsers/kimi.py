"""config.json of Kimi K2.5 -> ModelConfig: DeepSeek V3's text model with a vision tower; the tower of Kimi K3. Imports
no torch.

The tower's fields have two spellings: the publisher's, and transformers'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.config import ModelConfig
from moe_engine.models.config_parsers.families import parse_deepseek
from moe_engine.models.config_sections.fields import Fields, check_heads
from moe_engine.models.config_sections.vision import KIMI, KIMI_K3, VisionConfig

NORM_EPS = 1e-5


def parse_kimi_k25(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Kimi K2.5, K2.6, K2.7. Without `vision_config` the text model alone."""
    config = parse_deepseek(fields, generation)
    section = fields.section("vision_config")
    if section is None:
        return config
    width, heads = (
        _integer(section, "vt_hidden_size", "hidden_size"),
        _integer(section, "vt_num_attention_heads", "num_attention_heads"),
    )
    check_heads(section, "num_attention_heads", heads, width)
    projected = section.integer("mm_hidden_size", None) or fields.integer("projection_hidden_size", width)
    if projected != width:
        fields.fail("projection_hidden_size", f"{projected} is not the width {width} of the tower")
    eps = section.number("projector_ln_eps", None) or fields.number("projection_layer_norm_eps", NORM_EPS)
    if eps != NORM_EPS:
        fields.fail("projection_layer_norm_eps", f"{eps:g} is not supported; supported: {NORM_EPS:g}")
    vision = VisionConfig(
        tower=KIMI,
        width=width,
        num_layers=_integer(section, "vt_num_hidden_layers", "num_hidden_layers"),
        num_heads=heads,
        intermediate=_integer(section, "vt_intermediate_size", "intermediate_size"),
        patch_size=section.integer("patch_size", 14),
        temporal_patch_size=1,
        channels=3,
        merge=_square(section, section.raw.get("merge_kernel_size", [2, 2]), "merge_kernel_size"),
        out_width=config.hidden_size,
        image_token=_integer(fields, "media_placeholder_token_id", "image_token_id"),
        video_token=fields.integer("video_token_id", None, minimum=0),
        num_positions=_positions(section) ** 2,
        norm_eps=NORM_EPS,
        activation=section.choice("hidden_act", "gelu_pytorch_tanh", "gelu_pytorch_tanh"),
    )
    return replace(config, vision=vision)


K3_FORM = {
    "norm_type": "rmsnorm", "mlp_type": "mlp2", "attn_bias": False, "linear_bias": False,
    "patch_embed_proj_bias": False, "pos_emb_type": "divided_fixed", "pos_emb_interpolation_mode": "bilinear",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2", "projector_hidden_act": "gelu", "activation_func": "gelu_pytorch_tanh",
}  # fmt: skip
"""Fields of Kimi K3's tower that have one supported value."""


def kimi_k3_vision(fields: Fields, section: Fields, out_width: int) -> VisionConfig:
    """The tower of Kimi K3. section: `vision_config`."""
    for name, value in K3_FORM.items():
        if (found := section.raw.get(name, value)) != value:
            section.fail(name, f"{found!r} is not supported; supported: {value!r}")
    width, heads = section.integer("vt_hidden_size"), section.integer("vt_num_attention_heads")
    inner = section.integer("qkv_hidden_size", None) or width
    check_heads(section, "vt_num_attention_heads", heads, inner)
    if (projected := section.integer("mm_hidden_size", width)) != width:
        section.fail("mm_hidden_size", f"{projected} is not the width {width} of the tower")
    return VisionConfig(
        tower=KIMI_K3,
        width=width,
        attention_width=inner,
        num_layers=section.integer("vt_num_hidden_layers"),
        num_heads=heads,
        intermediate=section.integer("vt_intermediate_size"),
        patch_size=section.integer("patch_size", 14),
        temporal_patch_size=1,
        channels=3,
        merge=_square(section, section.raw.get("merge_kernel_size", [2, 2]), "merge_kernel_size"),
        out_width=out_width,
        image_token=fields.integer("media_placeholder_token_id"),
        video_token=None,
        num_positions=_positions(section) ** 2,
        projector_eps=float(section.number("projector_ln_eps", NORM_EPS, above=0)),
        activation="gelu_pytorch_tanh",
        size_marks=("<|media_begin|>", "<|media_content|>"),
    )


def _integer(fields: Fields, published: str, transformers: str) -> int:
    found: int = fields.integer(published if fields.has(published) else transformers)
    return found


def _positions(section: Fields) -> int:
    """Rows and columns of the table of learned positions."""
    names = [name for name in ("init_pos_emb", "pos_emb") if section.has(f"{name}_height")]
    name = names[0] if names else "pos_emb"
    sides = [section.integer(f"{name}_{side}", 64) for side in ("height", "width")]
    return _square(section, sides, f"{name}_height")


def _square(section: Fields, sides: Any, name: str) -> int:
    if not isinstance(sides, list) or len(sides) != 2 or sides[0] != sides[1] or not isinstance(sides[0], int):
        section.fail(name, f"needs two equal sizes, found {sides!r}")
    return int(sides[0])
