"""config.json of Cohere 2 (Command R7B, Command A) and of its mixtures (Command A+, North Mini Code) -> ModelConfig.
Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_engine.models.config import ModelConfig
from moe_engine.models.config_parsers.dense import without_positions
from moe_engine.models.config_parsers.families import FULL, WINDOWED, parse_gqa, plain_experts
from moe_engine.models.config_parsers.siglip import MODEL_TYPE, siglip_tower
from moe_engine.models.config_sections.fields import Fields, added_tokens
from moe_engine.models.config_sections.moe import MoEConfig
from moe_engine.models.config_sections.vision import COHERE2, VisionConfig

_SERVED = {
    "use_parallel_block": True, "transformer_block_type": "parallel", "use_qk_norm": False, "rotary_pct": 1.0,
    "position_embedding_type": "rope_gptj",
}  # fmt: skip
_MARKS = "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"
"""Tokens before and after an image, and after each of its tiles."""
_DENSE, _SPARSE = "dense", "sparse"


def parse_cohere2(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Cohere 2: attention and feed-forward read the same LayerNorm without a bias; windows with positions in three of
    four layers, no positions in the others; rotation of pairs (2j, 2j+1). In mixtures dense layers may have positions
    without a window."""
    fields.check_served(_SERVED)
    read, moe = cohere2_fields(fields), None
    if is_mixture(fields):
        fields.check_served({"rope_scaling": None})  # transformers reads `rope_parameters` alone
        moe = _experts(read)
    kinds, mlps = read.raw["layer_types"], read.raw["mlp_layer_types"]
    config = parse_gqa(read, generation, moe, tuple(kind == _SPARSE for kind in mlps), interleaved=True)
    config = replace(
        config,
        parallel=True,
        layer_norm=moe is None or not fields.has("rms_norm_eps"),
        norm_bias=False,
        num_nextn_predict_layers=0,
        logit_scale=fields.number("logit_scale", 0.0625, above=0),
        raw=fields.raw,
    )
    turned = moe is not None and fields.integer("prefix_dense_sliding_window_pattern", 1) == 1
    still = (i for i, kind in enumerate(kinds) if kind == FULL and not (turned and mlps[i] == _DENSE))
    return without_positions(config, still)


def parse_cohere2_vision(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Command A Vision: Cohere 2 with a SigLIP tower, or the text model of a file without such a tower."""
    config, section = parse_cohere2(fields, generation), fields.section("vision_config")
    if section is None or section.text("model_type", MODEL_TYPE) != MODEL_TYPE:
        return config
    return replace(config, vision=_tower(fields, section, config.hidden_size))


def _tower(fields: Fields, section: Fields, out_width: int) -> VisionConfig:
    """The tower with its projector. A prompt has an `<|IMG_PATCH|>` for each image."""
    size, patch = section.integer("image_size", 512), section.integer("patch_size", 16)
    merge, inner = fields.integer("downsample_factor", 2), fields.integer("alignment_intermediate_size", 36864)
    if size % (patch * merge):
        section.fail("image_size", f"{size} has no whole tokens: patches of {patch}, downsample_factor {merge}")
    if inner % 2:
        fields.fail("alignment_intermediate_size", f"{inner} is odd: half of it are gates")
    token, side = fields.integer("image_token_id", 255036, minimum=0), size // patch
    tower = siglip_tower(section, COHERE2, side, merge, token, out_width=out_width, width=1152, layers=27)
    found = added_tokens(Path(fields.source).parent, _MARKS)
    if missing := [name for name in _MARKS if name not in found]:
        fields.fail(
            "vision_config",
            f"needs the tokens {', '.join(missing)} in a tokenizer.json beside the file; add it, or serve the text "
            "alone with --json-model-override-args '{\"vision_config\": null}'",
        )
    start, end, behind = (found[name] for name in _MARKS)
    return replace(tower, projector_width=inner // 2, around=(start, end), tile=side, tile_marks=(behind,))


def is_mixture(fields: Fields) -> bool:
    """Whether the text model has experts."""
    return fields.text("model_type", "") == "cohere2_moe"


def _experts(read: Fields) -> MoEConfig:
    """Weights are those of the chosen experts' logits alone; their result is the mean or sum with the shared ones."""
    score = read.choice("expert_selection_fn", "softmax", "softmax", "sigmoid")
    count = read.integer("num_shared_experts", 0, minimum=0)
    how = read.choice("shared_expert_combination_strategy", "average", "average", "sum")
    part = 0.5 if count and how == "average" else 1.0
    return plain_experts(
        read, "num_experts", "moe_intermediate_size", shared_width=count * read.integer("moe_intermediate_size"),
        score=score, renormalize=score == "softmax" or read.flag("norm_topk_prob", True), scale=part,
        shared_scale=part,
    )  # fmt: skip


def cohere2_fields(fields: Fields) -> Fields:
    """The fields under the names of others, with transformers' kinds of layers."""
    layers, every = fields.integer("num_hidden_layers"), fields.integer("sliding_window_pattern", 4)
    moe = is_mixture(fields)
    rms = moe and fields.has("rms_norm_eps")
    first = fields.integer("first_k_dense_replace", 0, minimum=0) if moe else layers
    kinds = fields.by_layer("layer_types", layers, (FULL, WINDOWED))
    if kinds is None:
        before = min(first, layers) if moe else 0
        own = fields.integer("prefix_dense_sliding_window_pattern", 1)
        kinds = [FULL if (i + 1) % own == 0 else WINDOWED for i in range(before)]
        kinds += [FULL if (i + 1) % every == 0 else WINDOWED for i in range(layers - before)]
    mlps = fields.by_layer("mlp_layer_types", layers, (_DENSE, _SPARSE)) if moe else None
    raw = {
        **fields.raw, "layer_types": kinds, "use_sliding_window": True,
        "sliding_window": fields.integer("sliding_window"),
        "mlp_layer_types": mlps or [_DENSE if i < first else _SPARSE for i in range(layers)],
        "rms_norm_eps": fields.number("rms_norm_eps" if rms else "layer_norm_eps", 1e-5, above=0),
    }  # fmt: skip
    if moe:
        width = raw["moe_intermediate_size"] = fields.integer("intermediate_size")
        raw["intermediate_size"] = fields.integer("prefix_dense_intermediate_size", None) or width
    return Fields(raw, fields.source)
