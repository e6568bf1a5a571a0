"""Metadata of GGUF files of ERNIE 4.5 with experts -> fields of config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.models.gguf.keys import Keys


def ernie_moe_fields(keys: Keys, common: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The tensors tell which layers have experts, and whether a bias corrects the router's choice."""
    layers = [i for i in range(common["num_hidden_layers"]) if f"model.layers.{i}.mlp.gate.weight" in names]
    if not layers:
        raise ConfigError(f"{keys.path}: no layer has a router (ffn_gate_inp); download it again")
    return {
        "moe_num_experts": keys.need("expert_count"), "moe_k": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.get("expert_shared_count", 0),
        "moe_layer_start_index": layers[0], "moe_layer_end_index": layers[-1],
        "moe_layer_interval": keys.get("interleave_moe_layer_step", 1),
        "moe_use_aux_free": f"model.layers.{layers[0]}.mlp.moe_statics.e_score_correction_bias" in names,
    }  # fmt: skip
