"""config.json of MiniMax-M3 -> ModelConfig. Imports no torch.

Published files have `sparse_attention_config` and lists of 0 and 1 by layer; files that transformers saves have
`index_*` and lists of names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_engine.kernels.block_index.rule import BlockRule
from moe_engine.models.config import BlockSelection, GQAConfig, ModelConfig
from moe_engine.models.config_parsers.families import check_moe, parse_gqa
from moe_engine.models.config_sections.fields import Fields, added_tokens, rope_section
from moe_engine.models.config_sections.moe import MoEConfig
from moe_engine.models.config_sections.vision import MINIMAX_M3, VisionConfig

SPARSE = "minimax_m3_sparse"
"""Name of a layer with an indexer in `layer_types`."""
_NAMES = {
    "index_n_heads": "sparse_num_index_heads", "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size", "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}  # fmt: skip
_DEFAULTS = {
    "index_n_heads": 4, "index_head_dim": 128, "index_block_size": 128, "index_topk_blocks": 16,
    "index_local_blocks": 1,
}  # fmt: skip
_SERVED: dict[str, Any] = {
    "use_gemma_norm": True, "use_qk_norm": True, "qk_norm_type": "per_head", "scoring_func": "sigmoid",
    "use_routing_bias": True, "norm_topk_prob": True, "attention_output_gate": False, "attention_bias": False,
    "swiglu_beta": 1.0, "n_shared_experts": 1, "hidden_act": ("swigluoai", "silu"),
}  # fmt: skip
"""Fields that must have this value, or one of these, if they are there."""
_ACTIVATION, _AROUND = "gelu", ("]<]start of image[>[", "]<]end of image[>[")
_SERVED_TOWER: dict[str, Any] = {
    "projector_hidden_act": _ACTIVATION, "multimodal_projector_bias": True, "patch_merge_bias": True,
    "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
}  # fmt: skip


def parse_minimax_m3(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """MiniMax-M3: norms of weights less 1, block-sparse attention after dense first layers, a shared expert, and the
    activation of gpt-oss in all MLPs. Without `vision_config` the text model alone."""
    fields.check_served(_SERVED)
    read = Fields({**minimax_m3_fields(fields).raw, "hidden_act": "silu"}, fields.source)
    layers = read.integer("num_hidden_layers")
    moe = MoEConfig(
        num_experts=read.integer("num_local_experts", 128),
        top_k=read.integer("num_experts_per_tok", 4),
        width=read.integer("intermediate_size", 3072),
        shared_width=read.integer("shared_intermediate_size", 3072),
        score="sigmoid",
        has_bias=True,
        renormalize=True,
        scale=read.number("routed_scaling_factor", 2.0),
        alpha=read.number("swiglu_alpha", 1.702, above=0),
        limit=read.number("swiglu_limit", 7.0, above=0),
    )
    check_moe(read, moe)
    moe_layers = _by_layer(read, "mlp_layer_types", {"dense": False, "sparse": True}, layers)
    sparse = _by_layer(read, "layer_types", {"full_attention": False, SPARSE: True}, layers)
    dense = Fields({**read.raw, "layer_types": None, "intermediate_size": _dense_width(read)}, fields.source)
    config = parse_gqa(dense, generation, moe, moe_layers, partial_rotary=1.0, qk_norm="head")
    assert isinstance(config.attention, GQAConfig)
    _check_rotary(read, config.attention.head_dim)
    if any(sparse):
        blocks = _selection(read, config, tuple(i for i, own in enumerate(sparse) if not own))
        config = replace(config, attention=replace(config.attention, blocks=blocks))
    section, mtp = fields.section("vision_config"), fields.integer("num_mtp_modules", 0, minimum=0)
    vision = None if section is None else _tower(fields, section, config.hidden_size)
    return replace(config, norm_plus=1.0, num_nextn_predict_layers=mtp, raw=fields.raw, vision=vision)


def _check_rotary(fields: Fields, head_dim: int) -> None:
    """Raises ConfigError for `rotary_dim` alone: transformers does not read it, and other engines do."""
    section, part = rope_section(fields), "partial_rotary_factor"
    width = fields.integer("rotary_dim", None)
    if width not in (None, head_dim) and not any(own is not None and own.has(part) for own in (section, fields)):
        fields.fail("rotary_dim", f"{width} has no {part} with it; add {part}: {width / head_dim:g}")


def _tower(fields: Fields, section: Fields, hidden: int) -> VisionConfig:
    for part in (fields, section):
        part.check_served(_SERVED_TOWER)
    section.check_served({"hidden_act": _ACTIVATION})
    width, heads = section.integer("hidden_size", 1280), section.integer("num_attention_heads", 16)
    if width % heads or width // heads < 6:
        section.fail("num_attention_heads", f"{heads} does not divide {width} into heads of at least 6 channels")
    rotary = section.section("rope_parameters") or section
    sizes = section.section("img_token_compression_config") or section
    image = "image_token_index" if fields.has("image_token_index") else "image_token_id"
    token = fields.integer(image, 200025, minimum=0)
    video = "video_token_index" if fields.has("video_token_index") else "video_token_id"
    around = added_tokens(Path(fields.source).parent, _AROUND)
    return VisionConfig(
        tower=MINIMAX_M3,
        width=width,
        num_layers=section.integer("num_hidden_layers", 32),
        num_heads=heads,
        intermediate=section.integer("intermediate_size", 5120),
        patch_size=section.integer("patch_size", 14),
        temporal_patch_size=sizes.integer("temporal_patch_size", 2),
        channels=section.integer("num_channels", 3),
        merge=sizes.integer("spatial_merge_size", 2),
        out_width=hidden,
        image_token=token,
        video_token=fields.integer(video, 200026, minimum=0),
        norm_eps=section.number("layer_norm_eps", 1e-5),
        theta=rotary.number("rope_theta", 10000.0, above=0),
        activation=_ACTIVATION,
        projector_width=fields.integer("projector_hidden_size", hidden),
        around=(around.get(_AROUND[0], token + 4), around.get(_AROUND[1], token + 5)),
    )


def minimax_m3_fields(fields: Fields) -> Fields:
    """The fields under transformers' names, with those that tell what the layers are."""
    section, raw = fields.section("sparse_attention_config"), dict(fields.raw)
    layers = fields.integer("num_hidden_layers")
    for name, default in _DEFAULTS.items():
        published = None if section is None else section.raw.get(_NAMES[name])
        raw[name] = published if published is not None else raw.get(name, default)
    if raw.get("index_topk_pattern") is not None or raw.get("index_topk_freq") not in (None, 1):
        name = "index_topk_pattern" if raw.get("index_topk_pattern") is not None else "index_topk_freq"
        fields.fail(name, f"{raw[name]!r}: layers that share the selection of another layer are not supported")
    if section is not None:
        _check_sparse(section, layers)
        kinds = section.raw.get("sparse_attention_freq")
        if raw.get("layer_types") is None and kinds is not None and section.flag("use_sparse_attention", True):
            raw["layer_types"] = [SPARSE if kind else "full_attention" for kind in _flags(section, kinds, layers)]
    if raw.get("mlp_layer_types") is None and raw.get("moe_layer_freq") is not None:
        flags = raw["moe_layer_freq"]
        if not isinstance(flags, list) or len(flags) < layers:
            fields.fail("moe_layer_freq", f"needs a list of {layers} of 0 and 1, not {flags!r}")
        raw["mlp_layer_types"] = ["sparse" if flag else "dense" for flag in flags]
    raw["layer_types"] = raw.get("layer_types") or ["full_attention"] * layers
    raw["mlp_layer_types"] = raw.get("mlp_layer_types") or ["sparse"] * layers
    return Fields(raw, fields.source)


def minimax_m3_mixture(fields: Fields) -> Fields:
    """`minimax_m3_fields` with the widths of dense layers and experts under the names of DeepSeek's mixtures."""
    read = minimax_m3_fields(fields)
    widths = {
        "intermediate_size": _dense_width(read),
        "moe_intermediate_size": read.integer("intermediate_size", 3072),
        "shared_expert_intermediate_size": read.integer("shared_intermediate_size", 3072),
    }
    return Fields({**read.raw, **widths}, fields.source)


def _check_sparse(section: Fields, layers: int) -> None:
    """Raises ConfigError for parts of the indexer that are not served."""
    if section.integer("sparse_init_block", 0, minimum=0):
        section.fail("sparse_init_block", "is not 0: first blocks that are always selected are not supported")
    section.check_served({"sparse_score_type": "max"})
    kinds, without = section.raw.get("sparse_attention_freq"), section.raw.get("sparse_disable_index_value")
    if kinds is None or without is None or not section.flag("use_sparse_attention", True):
        return
    pairs = zip(_flags(section, kinds, layers), without if isinstance(without, list) else [without] * layers)
    if any(sparse and not disabled for sparse, disabled in pairs):
        section.fail("sparse_disable_index_value", "has 0 for a sparse layer: values of the indexer are not supported")


def _flags(section: Fields, kinds: Any, layers: int) -> list[int]:
    if not isinstance(kinds, list) or len(kinds) < layers or not all(kind in (0, 1) for kind in kinds):
        section.fail("sparse_attention_freq", f"needs {layers} of 0 and 1, not {kinds!r}")
    return kinds[:layers]


def _by_layer(fields: Fields, name: str, known: Mapping[str, bool], layers: int) -> tuple[bool, ...]:
    return tuple(known[kind] for kind in fields.by_layer(name, layers, known) or ())


def _dense_width(fields: Fields) -> int:
    width: int = fields.integer("dense_intermediate_size", 12288)
    return width


def _selection(fields: Fields, config: ModelConfig, dense_layers: tuple[int, ...]) -> BlockSelection:
    heads, width = fields.integer("index_n_heads"), fields.integer("index_head_dim")
    assert isinstance(config.attention, GQAConfig)
    if heads != config.attention.num_kv_heads:
        groups = config.attention.num_kv_heads
        fields.fail("index_n_heads", f"{heads} is not num_key_value_heads {groups}: each KV head has its own selection")
    if width < config.rope.width:
        fields.fail("index_head_dim", f"{width} is less than the {config.rope.width} rotated channels")
    rule = BlockRule(
        size=fields.integer("index_block_size"),
        top_k=fields.integer("index_topk_blocks"),
        local=fields.integer("index_local_blocks"),
    )
    if rule.local > rule.top_k:
        fields.fail("index_local_blocks", f"{rule.local} is more than index_topk_blocks {rule.top_k}")
    return BlockSelection(rule, width, dense_layers)
