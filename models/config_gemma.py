"""config.json of Gemma -> ModelConfig. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.kernels.gate_form import GELU
from moe_engine.models.config import GQAConfig, ModelConfig, ResultNorms
from moe_engine.models.config_families import parse_gqa, with_other_windows
from moe_engine.models.config_fields import Fields, rope_section

_FULL, _WINDOWED = "full_attention", "sliding_attention"
_SERVED = {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False}
_NORMS = ResultNorms(before_feed_forward="pre_feedforward_layernorm", of_feed_forward="post_feedforward_layernorm")
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
    return replace(
        _with_softmax_scale(config, fields.number("query_pre_attn_scalar", above=0)),
        max_position_embeddings=fields.integer("max_position_embeddings"),  # with the factor of the rotary scaling
        norm_plus=1.0,
        activation=GELU,
        result_norms=_NORMS,
        embed_scale=config.hidden_size**0.5,
        rounds_scale=True,
        logit_cap=fields.number("final_logit_softcapping", 0.0, above=0),
        raw=fields.raw,
    )


def gemma_fields(fields: Fields) -> Fields:
    """The fields with the kind of each layer."""
    layers, every = fields.integer("num_hidden_layers"), fields.integer("sliding_window_pattern", 6)
    kinds = fields.raw.get("layer_types") or [_WINDOWED if (i + 1) % every else _FULL for i in range(layers)]
    return Fields({**fields.raw, "layer_types": kinds, "use_sliding_window": True}, fields.source)


def _ropes(fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary settings of layers without a window and with one, in either dialect."""
    section = rope_section(fields)
    found = {} if section is None else section.raw
    by_kind = _FULL in found or _WINDOWED in found
    full, windowed = (found.get(_FULL) or {}, found.get(_WINDOWED) or {}) if by_kind else (found, {})
    theta = fields.number("rope_theta", 1e6, above=0), fields.number("rope_local_base_freq", 1e4, above=0)
    return {"rope_theta": theta[0], **full}, {"rope_theta": theta[1], **windowed}


def _with_softmax_scale(config: ModelConfig, scalar: float) -> ModelConfig:
    """Scores are multiplied by scalar^-0.5."""
    assert isinstance(config.attention, GQAConfig)
    own = {"softmax_factor": (config.attention.head_dim / scalar) ** 0.5, "max_position": 0}
    others = config.other_layers
    if others is not None:
        others = replace(others, rope=replace(others.rope, **own))
    return replace(config, rope=replace(config.rope, **own), other_layers=others)
