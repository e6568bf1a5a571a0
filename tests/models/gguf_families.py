"""Checkpoints of more families as GGUF files, with the names, orders and metadata of llama.cpp's converter.

The same reordering of rows runs over the index of each value: it maps the values of a file back to the hub's order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.gguf_export import reorder, tokenizer_metadata, write_container
from tests.models.gguf import rope_factors, store

ARCHITECTURES = {
    "phi3": "phi3", "granite": "granite", "granitemoe": "granitemoe", "granitemoeshared": "granitemoe",
    "granitemoehybrid": "granitehybrid", "glm4": "glm4", "glm4_moe": "glm4moe", "qwen2_moe": "qwen2moe",
    "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "gemma4_text": "gemma4",
    "nemotron_h": "nemotron_h_moe", "gemma2": "gemma2", "olmo2": "olmo2", "olmo3": "olmo2", "exaone4": "exaone4",
    "cohere2": "cohere2", "ernie4_5": "ernie4_5", "ernie4_5_moe": "ernie4_5-moe", "dots1": "dots1",
}  # fmt: skip
"""By `model_type`."""
NETS = ("qwen3next", "qwen35", "qwen35moe")
_WHOLE = {
    "model.embed_tokens": "token_embd", "backbone.embeddings": "token_embd", "model.norm": "output_norm",
    "backbone.norm_f": "output_norm", "lm_head": "output",
}  # fmt: skip
_PARTS = {
    "input_layernorm.weight": "attn_norm.weight", "norm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight", "self_attn.qkv_proj.weight": "attn_qkv.weight",
    "mlp.gate_up_proj.weight": "ffn_up.weight", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.router.layer.weight": "ffn_gate_inp.weight", "mlp.gate.weight": "ffn_gate_inp.weight",
    "router.proj.weight": "ffn_gate_inp.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "layer_scalar": "layer_output_scale.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight", "shared_mlp.output_linear.weight":
    "ffn_down_shexp.weight", "block_sparse_moe.output_linear.weight": "ffn_down_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight", "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight", "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    **{f"{hub}.weight": f"nextn.{hub.replace('.', '_')}.weight"
       for hub in ("eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens")},
    **{f"self_attn.{hub}.{kind}": f"attn_{own}.{kind}" for kind in ("weight", "bias") for hub, own in (
        ("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "output"), ("q_norm", "q_norm"),
        ("k_norm", "k_norm"))},
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    **{f"mlp.{block}.{part}_proj.weight": f"ffn_{part}_shexp.weight"
       for block in ("shared_expert", "shared_experts") for part in ("gate", "up", "down")},
    **{f"mlp.experts.{part}_proj.weight": f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")},
    **{f"{block}.{hub}": own for block in ("linear_attn", "mamba", "mixer") for hub, own in (
        ("in_proj.weight", "ssm_in.weight"), ("conv1d.weight", "ssm_conv1d.weight"),
        ("conv1d.bias", "ssm_conv1d.bias"), ("A_log", "ssm_a"), ("D", "ssm_d"), ("dt_bias", "ssm_dt.bias"),
        ("norm.weight", "ssm_norm.weight"), ("out_proj.weight", "ssm_out.weight"))},
}  # fmt: skip
_RESULTS = {"post_attention_layernorm.weight": "post_attention_norm.weight"} | {
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight"
}
_OTHERS = {
    **dict.fromkeys(("olmo2", "exaone4"), _RESULTS),
    "gemma2": _RESULTS | {"pre_feedforward_layernorm.weight": "ffn_norm.weight"},
    "glm4": {
        "post_self_attn_layernorm.weight": "post_attention_norm.weight",
        "post_mlp_layernorm.weight": "post_ffw_norm.weight",
    },
    "gemma4": _RESULTS | {
        "pre_feedforward_layernorm.weight": "ffn_norm.weight",
        "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
        "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
        "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    },
    **{key: {"post_attention_layernorm.weight": "post_attention_norm.weight"} for key in ("glm4moe", *NETS)},
}  # fmt: skip
_YARN = {
    "factor": "factor", "original_context_length": "original_max_position_embeddings",
    **{f"yarn_{key}": key for key in ("beta_fast", "beta_slow")}, "yarn_attn_factor": "attention_factor",
}  # fmt: skip
_LAYER = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def write_family(source: Path, path: Path, type_of: Callable[[str], str]) -> dict[str, Tensor]:
    """Writes the file; returns the hub's tensors with its values.

    Args:
        type_of: name in the GGUF file -> type of a matrix.
    """
    fields = json.loads((source / "config.json").read_text())
    found, stored = load_file(source / "model.safetensors"), dict[str, Any]()
    values = {name: torch.empty(tensor.numel()) for name, tensor in found.items()}
    stacks: dict[str, list[tuple[str, Tensor, Tensor]]] = {}
    for name, tensor in sorted(found.items(), key=lambda item: _place(item[0])):
        places = torch.arange(tensor.numel()).view(tensor.shape)
        pieces = zip(_pieces(name, tensor, fields), _pieces(name, places, fields))
        for (own, part), (_, origin) in pieces:
            stacks.setdefault(own, []).append((name, part, origin))
    for own, parts in stacks.items():
        is_expert = _EXPERT.search(parts[0][0]) is not None
        whole = torch.stack([part for _, part, _ in parts]) if is_expert else parts[0][1]
        assert is_expert or len(parts) == 1, own
        forward, back = _shift(parts[0][0], ARCHITECTURES[fields["model_type"]])
        plain = any(part in own for part in ("_norm", "ssm_conv1d", "exp_probs_b"))
        kept = back(store(stored, own, forward(whole).contiguous(), (lambda _: "F32") if plain else type_of))
        for (name, _, origin), value in zip(parts, kept if is_expert else [kept]):
            values[name][origin.flatten()] = value.flatten()
    write_container(path, _metadata(fields) | tokenizer_metadata(source), stored | _rotary(fields))
    return {name: value.view(found[name].shape) for name, value in values.items()}


def _place(name: str) -> tuple[str, int]:
    match = _EXPERT.search(name)
    return _EXPERT.sub(".experts.", name), int(match[1]) if match else 0


def _shift(name: str, architecture: str) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """What the converter does to values, and its inverse."""
    if name.endswith(".A_log"):
        return lambda x: -x.exp(), lambda x: (-x).log()
    if (
        architecture in (*NETS, "gemma2")
        and name.endswith("norm.weight")
        and not name.endswith("linear_attn.norm.weight")
    ):
        return lambda x: x.float() + 1, lambda x: x - 1
    return lambda x: x, lambda x: x


def _pieces(name: str, tensor: Tensor, fields: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the file for one of the hub."""
    architecture, match = ARCHITECTURES[fields["model_type"]], _LAYER.fullmatch(name)
    if match is None:
        module, _, kind = name.rpartition(".")
        yield f"{_WHOLE[module]}.{kind}", tensor
        return
    block, part = f"blk.{match[1]}.", _EXPERT.sub(".experts.", f".{match[2]}").removeprefix(".")
    if architecture.startswith("nemotron"):
        inner = part.removeprefix("mixer.")
        is_attention, is_state = inner[1:6] == "_proj", f"mixer.{inner}" in _PARTS
        part = part if is_state or inner == part else f"{'self_attn' if is_attention else 'mlp'}.{inner}"
    if part.endswith("in_proj_qkvz.weight"):
        keys, values = fields["linear_num_key_heads"], fields["linear_num_value_heads"]
        key, value = fields["linear_key_head_dim"], fields["linear_value_head_dim"] * values // keys
        q, k, v, z = (each.flatten(0, 1) for each in tensor.unflatten(0, (keys, -1)).split([key, key, value, value], 1))
        yield f"{block}attn_qkv.weight", torch.cat((q, k, v))
        yield f"{block}attn_gate.weight", z
    elif part.endswith(("block_sparse_moe.input_linear.weight", "shared_mlp.input_linear.weight")):
        end = "exps" if "block" in part else "shexp"
        for own, half in zip(("gate", "up"), tensor.chunk(2, -2)):
            yield f"{block}ffn_{own}_{end}.weight", half
    else:
        yield block + _OTHERS.get(architecture, {}).get(part, _PARTS.get(part, "")), _ordered(part, tensor, fields)


def _ordered(part: str, tensor: Tensor, fields: dict[str, Any]) -> Tensor:
    """Rows, columns and shape as in the file."""
    architecture = ARCHITECTURES[fields["model_type"]]
    module = part.split(".")[-2] if "." in part else ""
    if architecture.startswith(("granite", "nemotron")) and module in ("q_proj", "k_proj"):
        return reorder(tensor, fields["num_attention_heads" if module == "q_proj" else "num_key_value_heads"])
    if part.endswith("conv1d.weight"):
        tensor = tensor.squeeze(1)
    if architecture in ("qwen35", "qwen35moe") and part.startswith("linear_attn.") and "norm" not in part:
        keys, values = fields["linear_num_key_heads"], fields["linear_num_value_heads"]
        if part.endswith("out_proj.weight"):
            return _tiled(tensor.T, keys, values).T
        first = 2 * keys * fields["linear_key_head_dim"] if "qkv" in part or "conv" in part else 0
        return torch.cat((tensor[:first], _tiled(tensor[first:], keys, values)))
    if part.endswith((".A_log", ".D")) and architecture not in NETS:
        return tensor.unsqueeze(-1)
    return tensor.view(fields.get("n_groups", 1), -1) if part in ("mamba.norm.weight", "mixer.norm.weight") else tensor


def _tiled(tensor: Tensor, keys: int, values: int) -> Tensor:
    """The value heads of a key head apart: [r, Hk, D] for [Hk, r, D]."""
    return tensor.unflatten(0, (keys, values // keys, -1)).transpose(0, 1).flatten(0, 2)


def _rotary(fields: dict[str, Any]) -> dict[str, Any]:
    scaling, kind = fields.get("rope_scaling") or {}, fields["model_type"]
    found = {f"rope_factors_{name}.weight": scaling.get(f"{name}_factor") for name in ("long", "short")}
    if kind == "gemma4_text":
        pairs = fields["global_head_dim"] // 2
        turned = int(fields["rope_parameters"]["full_attention"]["partial_rotary_factor"] * pairs)
        found["rope_freqs.weight"] = [1.0] * turned + [1e30] * (pairs - turned)
    made = {name: torch.tensor(factors).numpy() for name, factors in found.items() if factors}
    if (llama := rope_factors(fields)) is not None:
        made["rope_freqs.weight"] = llama
    return {name: ("F32", factors.shape, factors.tobytes()) for name, factors in made.items()}


def _norms(fields: dict[str, Any]) -> dict[str, Any]:
    if "layer_norm_eps" in fields:
        return {"attention.layer_norm_epsilon": fields["layer_norm_eps"]}
    return {"attention.layer_norm_rms_epsilon": fields.get("layer_norm_epsilon", fields.get("rms_norm_eps"))}


def _metadata(fields: dict[str, Any]) -> dict[str, Any]:
    kind, name = fields["model_type"], ARCHITECTURES[fields["model_type"]]
    width = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    layers, drafts = fields["num_hidden_layers"], fields.get("num_nextn_predict_layers", 0)
    found: dict[str, Any] = {
        "block_count": layers + drafts, "nextn_predict_layers": drafts,
        "context_length": fields["max_position_embeddings"],
        "embedding_length": fields["hidden_size"], "feed_forward_length": fields["intermediate_size"],
        "attention.head_count": fields["num_attention_heads"],
        "attention.head_count_kv": fields["num_key_value_heads"], "rope.freq_base": fields.get("rope_theta", 1e4),
        **_norms(fields),
        "rope.dimension_count": int(width * fields.get("partial_rotary_factor", 1.0)),
    }  # fmt: skip
    if "head_dim" in fields:
        found |= {"attention.key_length": width, "attention.value_length": width}
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if experts := next((fields[each] for each in names if each in fields), 0):
        used = fields.get("num_experts_per_tok", fields.get("top_k_experts", fields.get("moe_k")))
        found |= {"expert_count": experts, "expert_used_count": used}
    for key, own in (
        ("moe_intermediate_size", "expert_feed_forward_length"), ("n_shared_experts", "expert_shared_count"),
        ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
        ("shared_intermediate_size", "expert_shared_feed_forward_length"),
        ("moe_shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
        ("attention_multiplier", "attention.scale"), ("embedding_multiplier", "embedding_scale"),
        ("residual_multiplier", "residual_scale"), ("logits_scaling", "logit_scale"),
        ("first_k_dense_replace", "leading_dense_block_count"), ("routed_scaling_factor", "expert_weights_scale"),
        ("n_group", "expert_group_count"), ("full_attention_interval", "full_attention_interval"),
        ("linear_conv_kernel_dim", "ssm.conv_kernel"), ("linear_key_head_dim", "ssm.state_size"),
        ("linear_num_key_heads", "ssm.group_count"), ("linear_num_value_heads", "ssm.time_step_rank"),
        ("mamba_d_conv", "ssm.conv_kernel"), ("mamba_d_state", "ssm.state_size"),
        ("mamba_n_groups", "ssm.group_count"), ("mamba_n_heads", "ssm.time_step_rank"),
        ("conv_kernel", "ssm.conv_kernel"), ("ssm_state_size", "ssm.state_size"),
        ("n_groups", "ssm.group_count"), ("mamba_num_heads", "ssm.time_step_rank"),
        ("final_logit_softcapping", "final_logit_softcapping"), ("logit_scale", "logit_scale"),
        ("attn_logit_softcapping", "attn_logit_softcapping"), ("moe_num_shared_experts", "expert_shared_count"),
        ("moe_layer_start_index", "leading_dense_block_count"), ("moe_layer_interval", "interleave_moe_layer_step"),
    ):  # fmt: skip
        if fields.get(key) is not None:
            found[own] = fields[key]
    heads = found.get("ssm.time_step_rank", 0)
    state = next(
        (fields[key] for key in ("linear_value_head_dim", "mamba_head_dim", "mamba_d_head") if key in fields), 0
    )
    if heads:
        found["ssm.inner_size"] = heads * state
    if kind == "glm4_moe":
        found |= {"expert_gating_func": 2, "expert_weights_norm": fields["norm_topk_prob"]}
    if kind in ("gemma2", "olmo3", "exaone4", "cohere2") and fields["sliding_window"]:
        found["attention.sliding_window"] = fields["sliding_window"]
    if kind in ("olmo3", "exaone4") and fields["sliding_window"]:
        found["attention.sliding_window_pattern"] = [int(one == "sliding_attention") for one in fields["layer_types"]]
    if kind == "olmo3":
        scaling = fields["rope_parameters"]["full_attention"]
        found |= {f"rope.scaling.{key}": scaling[own] for key, own in _YARN.items()} | {"rope.scaling.type": "yarn"}
        found["rope.freq_base"] = scaling["rope_theta"]
    if kind == "dots1":
        found["expert_weights_norm"] = fields["norm_topk_prob"]
    if kind == "granitemoehybrid":
        found["rope.scaling.finetuned"] = False
    if kind == "phi3" and "rope_scaling" in fields:
        found["rope.scaling.original_context_length"] = fields["original_max_position_embeddings"]
    if kind == "gemma4_text":
        own = [int(one == "sliding_attention") for one in fields["layer_types"]]
        ropes, full = fields["rope_parameters"], fields["global_head_dim"]
        found |= {
            "attention.key_length": full, "attention.value_length": full, "attention.key_length_swa": width,
            "attention.value_length_swa": width, "attention.sliding_window": fields["sliding_window"],
            "attention.sliding_window_pattern": own, "rope.dimension_count": full, "rope.dimension_count_swa": width,
            "attention.head_count_kv": [
                fields["num_key_value_heads" if one else "num_global_key_value_heads"] for one in own
            ],
            "rope.freq_base": ropes["full_attention"]["rope_theta"],
            "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"], "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
        }  # fmt: skip
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in found.items()}
