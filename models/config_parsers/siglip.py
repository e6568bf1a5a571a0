"""The SigLIP tower of config.json (Gemma 3, Command A Vision)."""

from __future__ import annotations

from moe_engine.models.config_sections.fields import Fields, check_heads
from moe_engine.models.config_sections.vision import VisionConfig

MODEL_TYPE, ACTIVATION = "siglip_vision_model", "gelu_pytorch_tanh"


def siglip_tower(
    section: Fields, tower: str, side: int, merge: int, image_token: int, *, out_width: int, width: int, layers: int
) -> VisionConfig:
    """Args:
    section: vision_config.
    side: patches of a picture (a tile or an image) in one direction.
    width, layers: the tower's, if the section has none.
    """
    section.check_served({"hidden_act": ACTIVATION})
    width, heads = section.integer("hidden_size", width), section.integer("num_attention_heads", 12)
    check_heads(section, "num_attention_heads", heads, width)
    return VisionConfig(
        tower=tower,
        width=width,
        num_layers=section.integer("num_hidden_layers", layers),
        num_heads=heads,
        intermediate=section.integer("intermediate_size", 3072),
        patch_size=section.integer("patch_size", 16),
        temporal_patch_size=1,
        channels=section.integer("num_channels", 3),
        merge=merge,
        out_width=out_width,
        image_token=image_token,
        video_token=None,
        num_positions=side**2,
        norm_eps=section.number("layer_norm_eps", 1e-6, above=0),
        activation=ACTIVATION,
    )
