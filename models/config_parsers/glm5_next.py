"""config.json of GLM-5.3-Flash (`glm5_next`) -> ModelConfig. Imports no torch.

Published files have `linear_attn_config`, files that transformers saves have `linear_*`: both are read. The text model
is in `text_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.config_parsers.compressed import parse_streams
from moe_engine.models.config_parsers.families import parse_deepseek
from moe_engine.models.config_parsers.indexer import parse_indexer
from moe_engine.models.config_parsers.kimi_linear import FULL, LINEAR, checked_kinds, decay_bound, delta_fields, renamed
from moe_engine.models.config_parsers.vision import glm5_next_vision
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.config_sections.state import DeltaConfig

_SPARSE = ("deepseek_sparse_attention", "indexed_attention", FULL)
"""Names of a layer of MLA in `layer_types`: published, and as transformers saves them."""
_SERVED: dict[str, Any] = {
    "index_kpool_always_select_tail": True, "index_kpool_compress": True, "mhc": True, "mla_use_nope": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "attention_bias": False,
}  # fmt: skip
"""Fields that must have this value, if they are there."""
_BOUND = -5.0
_WIDTH_FOR_ROPE = 2


def glm5_next_fields(fields: Fields) -> Fields:
    """The fields under the names of DeepSeek and of Qwen3-Next, with the kind of each layer."""
    raw, layers = renamed(fields, {}), fields.integer("num_hidden_layers")
    own = fields.section("linear_attn_config") or Fields({}, fields.source)
    raw |= delta_fields(fields, own, heads=64)
    kinds = fields.raw.get("layer_types") or [FULL if i % 4 == 3 else LINEAR for i in range(layers)]
    if isinstance(kinds, list):
        kinds = [FULL if kind in _SPARSE else kind for kind in kinds]
    raw["layer_types"] = checked_kinds(fields, kinds, layers, "layer_types")
    return Fields(raw, fields.source)


def parse_glm5_next(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """GLM-5.3-Flash: Kimi Delta Attention with bounded decays, MLA without positions over selected pools of tokens,
    residual streams with a mean at the end, clamped SwiGLU in all MLPs; a vision tower."""
    fields.check_served(_SERVED)
    if fields.integer("qk_rope_head_dim", 0, minimum=0):
        fields.fail("qk_rope_head_dim", "is not 0: rotated keys are not supported in this family")
    read = glm5_next_fields(fields)
    limit = read.number("swiglu_limit", 10.0, above=0)
    raw = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"} | dict(read.raw)
    raw |= {"qk_rope_head_dim": _WIDTH_FOR_ROPE, "rope_scaling": None, "rope_parameters": None}
    read = Fields(raw, fields.source)
    config = parse_deepseek(read, generation)
    assert isinstance(config.attention, MLAConfig)
    attention = parse_indexer(read, replace(config.attention, qk_rope_head_dim=0, latent_eps=config.norm_eps))
    states = tuple(i for i, kind in enumerate(raw["layer_types"]) if kind == LINEAR)
    heads, width = read.integer("linear_num_key_heads"), read.integer("linear_key_head_dim")
    delta = DeltaConfig(
        heads, heads, width, width, read.integer("linear_conv_kernel_dim"), joined=False, by_channel=True,
        bound=_bound(fields), flat_rates=True,
    )  # fmt: skip
    return replace(
        config,
        attention=_with_pools(read, attention, states),
        moe=None if config.moe is None else replace(config.moe, limit=limit, dense_limit=limit),
        rope=replace(config.rope, kind="none", width=0),
        delta=delta,
        streams=replace(parse_streams(read), mean_head=True),
        state_groups=delta.state_groups(states),
        vision=glm5_next_vision(fields, config.hidden_size),
        raw=fields.raw,
    )


def _with_pools(fields: Fields, attention: MLAConfig, states: tuple[int, ...]) -> MLAConfig:
    indexer, pool = attention.indexer, fields.integer("index_kpool", 16, minimum=2)
    assert indexer is not None
    if indexer.top_k % pool:
        fields.fail("index_kpool", f"{pool} does not divide index_topk {indexer.top_k}")
    if set(indexer.shared_layers) - set(states):
        fields.fail("indexer_types", "has layers that share a selection; they are not supported with pools of keys")
    return replace(attention, indexer=replace(indexer, pool=pool, shared_layers=(), shares_drafts=False))


def _bound(fields: Fields) -> float:
    """The bound of the log decay; 0: it has none."""
    own = fields.section("linear_attn_config")
    section, name = (fields, "linear_lower_bound")
    if own is not None and "gate_lower_bound" in own.raw:
        section, name = own, "gate_lower_bound"
    has_default = name not in section.raw or (own is not None and own.flag("safe_gate", True))
    return decay_bound(section, name, _BOUND if has_default else None)
