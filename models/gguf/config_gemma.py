"""Metadata of GGUF files of Gemma -> fields of config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.models.gguf.keys import FREQUENCIES, Keys, factors_of, windows

_PATTERN = "attention.sliding_window_pattern"
_GEMMA2_27B, _GEMMA3_27B = 46, 62
"""Layers of the models whose scores are divided by the root of hidden size / heads; of others by that of a head's
width. The metadata do not contain it; llama.cpp decides so, too."""


def gemma2_fields(keys: Keys, common: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    heads, layers = common["num_attention_heads"], common["num_hidden_layers"]
    return windows(keys, layers, 2) | {
        "sliding_window": keys.get("attention.sliding_window", 4096),
        "query_pre_attn_scalar": common["hidden_size"] // heads if layers == _GEMMA2_27B else common["head_dim"],
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0),
        "norm_plus": 0.0,  # the converter has added 1 to the norms
    }


def gemma3_fields(keys: Keys, common: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    heads, layers = common["num_attention_heads"], common["num_hidden_layers"]
    width = common["head_dim"] or common["hidden_size"] // heads
    return windows(keys, layers, 6) | {
        "query_pre_attn_scalar": common["hidden_size"] // heads if layers == _GEMMA3_27B else width,
        "rope_local_base_freq": keys.get("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "norm_plus": 0.0,  # the converter has added 1 to the norms
    }


def gemma4_fields(keys: Keys, common: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Gemma 4: layers without a window have heads of their own, may have no values, and rotate some of their pairs:
    the factors of the others' frequencies are so large that the angles are 0."""
    layers = common["num_hidden_layers"]
    windowed = [bool(own) for own in keys.by_layer(_PATTERN, layers)]
    groups = keys.by_layer("attention.head_count_kv", layers)
    full = [layer for layer in range(layers) if not windowed[layer]]
    own = windowed.index(True) if True in windowed else 0
    factors = factors_of(keys.container)
    if not full or factors is None or set(factors) - {1.0, max(factors)}:
        raise ConfigError(f"{keys.path}: {FREQUENCIES} has no factors of Gemma 4, or no layer is without a window")
    experts = keys.get("expert_count", 0)
    found: dict[str, Any] = {
        "head_dim": keys.get("attention.key_length_swa") or keys.need("attention.key_length"),
        "global_head_dim": keys.need("attention.key_length"),
        "num_key_value_heads": groups[own], "num_global_key_value_heads": groups[full[0]],
        "attention_k_eq_v": f"model.layers.{full[0]}.self_attn.v_proj.weight" not in names,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windowed],
        "sliding_window": keys.need("attention.sliding_window"),
        "hidden_size_per_layer_input": keys.get("embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": keys.get("attention.shared_kv_layers", 0),
        "final_logit_softcapping": keys.get("final_logit_softcapping"), "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": keys.get("rope.freq_base", 1e6)}
            | {"partial_rotary_factor": factors.count(1.0) / len(factors)},
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", 1e4)},
        },
        "enable_moe_block": bool(experts),
    }  # fmt: skip
    if experts:
        found |= {"num_experts": experts, "top_k_experts": keys.need("expert_used_count")}
        found["moe_intermediate_size"] = keys.need("expert_feed_forward_length")
    return found
