"""Metadata of GGUF files of Granite, and of families with states -> fields of config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.models.gguf.keys import Keys

_LINEAR, _FULL = "linear_attention", "full_attention"


def granite_fields(keys: Keys, common: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Granite 3 and 4: factors; of a hybrid Mamba2's sizes, and the kinds of layers, as their tensors tell."""
    found: dict[str, Any] = {
        "embedding_multiplier": keys.get("embedding_scale", 1.0),
        "residual_multiplier": keys.get("residual_scale", 1.0),
        "attention_multiplier": keys.get("attention.scale", 1.0),
        "logits_scaling": keys.get("logit_scale", 1.0),
    }
    if keys.architecture != "granitehybrid":
        return found
    layers, mamba = common["num_hidden_layers"], _mamba(keys, names)
    return found | {
        "layer_types": [_kind(f"model.layers.{layer}.", names) for layer in range(layers)],
        "position_embedding_type": "rope" if keys.get("rope.scaling.finetuned", False) else "nope",
        "shared_intermediate_size": keys.get("expert_shared_feed_forward_length") or common["intermediate_size"],
        "mamba_n_heads": mamba["heads"], "mamba_d_head": mamba["width"], "mamba_d_state": mamba["state"],
        "mamba_d_conv": mamba["taps"], "mamba_n_groups": mamba["groups"], "mamba_conv_bias": mamba["bias"],
        "mamba_expand": keys.need("ssm.inner_size") // common["hidden_size"],
    }  # fmt: skip


def nemotron_fields(keys: Keys, common: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Nemotron-H: the tensors of a layer tell what it is."""
    layers, mamba, experts = common["num_hidden_layers"], _mamba(keys, names), keys.get("expert_count", 0)
    found = {
        "layers_block_type": [_kind(f"model.layers.{layer}.", names) for layer in range(layers)],
        "layer_norm_epsilon": common["rms_norm_eps"], "head_dim": keys.need("attention.key_length"),
        "mamba_num_heads": mamba["heads"], "mamba_head_dim": mamba["width"], "ssm_state_size": mamba["state"],
        "conv_kernel": mamba["taps"], "n_groups": mamba["groups"], "use_conv_bias": mamba["bias"],
    }  # fmt: skip
    if not experts:
        return found
    if (keys.get("expert_group_count") or 1) > 1 and not keys.get("expert_group_used_count"):
        name = f"{keys.architecture}.expert_group_used_count"
        raise ConfigError(f"{keys.path}: has no {name}; use the model's safetensors")
    return found | {
        "n_routed_experts": experts, "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": keys.need("expert_shared_feed_forward_length"),
        "n_shared_experts": keys.get("expert_shared_count", 1), "n_group": keys.get("expert_group_count") or 1,
        "topk_group": keys.get("expert_group_used_count") or 1,
        "norm_topk_prob": bool(keys.get("expert_weights_norm", True)),
        "routed_scaling_factor": keys.get("expert_weights_scale", 1.0), "moe_latent_size": keys.get("moe_latent_size"),
    }  # fmt: skip


def _kind(layer: str, names: Collection[str]) -> str:
    """What a layer of Granite 4 or Nemotron-H is."""
    parts = {"linear_attn.in_proj": "mamba", "self_attn.q_proj": "attention", "mlp.gate": "moe"}
    return next((kind for part, kind in parts.items() if f"{layer}{part}.weight" in names), "mlp")


def delta_fields(keys: Keys, common: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Qwen3-Next and Qwen3.5: gated delta nets, with input projections apart in every file."""
    heads, layers = keys.need("ssm.time_step_rank"), range(common["num_hidden_layers"])
    states = [f"model.layers.{layer}.linear_attn.out_proj.weight" in names for layer in layers]
    return {
        "linear_num_key_heads": keys.need("ssm.group_count"), "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.need("ssm.state_size"),
        "linear_value_head_dim": keys.need("ssm.inner_size") // max(1, heads),
        "linear_conv_kernel_dim": keys.need("ssm.conv_kernel"),
        "layer_types": [_LINEAR if state else _FULL for state in states],
        "linear_joined": False,
        "norm_plus": 0.0,  # the converter has added 1 to the norms
    }  # fmt: skip


def _mamba(keys: Keys, names: Collection[str]) -> dict[str, Any]:
    heads = keys.need("ssm.time_step_rank")
    return {
        "heads": heads, "width": keys.need("ssm.inner_size") // max(1, heads), "state": keys.need("ssm.state_size"),
        "taps": keys.need("ssm.conv_kernel"), "groups": keys.need("ssm.group_count"),
        "bias": any(name.endswith(".conv1d.bias") for name in names),
    }  # fmt: skip
