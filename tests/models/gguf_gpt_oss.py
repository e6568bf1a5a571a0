"""A gpt-oss checkpoint as a GGUF file, with the names and metadata of llama.cpp's converter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.gguf_export import tokenizer_metadata, write_container
from tests.models.gguf import store

_NAMES = {
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.sinks": "attn_sinks.weight", "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias", "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
} | {
    f"self_attn.{hub}_proj.{kind}": f"attn_{own}.{kind}"
    for hub, own in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output")) for kind in ("weight", "bias")
}  # fmt: skip
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}  # fmt: skip


def write_gpt_oss(source: Path, path: Path, type_of: Callable[[str], str]) -> dict[str, Tensor]:
    """Returns the hub's tensors with the values of the file. Gate and up alternate there, and are two tensors here.

    Args:
        type_of: name in the GGUF file -> type of a matrix.
    """
    fields, stored, values = json.loads((source / "config.json").read_text()), {}, {}

    def kept(name: str, tensor: Tensor) -> Tensor:
        return store(stored, name, tensor.contiguous(), (lambda _: "F32") if name.endswith(".bias") else type_of)

    for name, tensor in sorted(load_file(source / "model.safetensors").items()):
        if name in _WHOLE:
            values[name] = kept(_WHOLE[name], tensor)
            continue
        _, _, layer, part = name.split(".", 3)
        block = f"blk.{layer}."
        if part in _NAMES:
            values[name] = kept(block + _NAMES[part], tensor)
        elif part == "mlp.experts.down_proj":
            values[name] = kept(block + "ffn_down_exps.weight", tensor.transpose(1, 2)).transpose(1, 2)
        elif part == "mlp.experts.gate_up_proj":
            halves = tensor.transpose(1, 2).unflatten(1, (-1, 2)).unbind(2)
            found = [kept(f"{block}ffn_{own}_exps.weight", half) for own, half in zip(("gate", "up"), halves)]
            values[name] = torch.stack(found, 2).flatten(1, 2).transpose(1, 2)
        else:
            assert part == "mlp.experts.gate_up_proj_bias"
            halves = tensor.unflatten(1, (-1, 2)).unbind(2)
            found = [kept(f"{block}ffn_{own}_exps.bias", half) for own, half in zip(("gate", "up"), halves)]
            values[name] = torch.stack(found, -1).flatten(1)
    write_container(path, _metadata(fields) | tokenizer_metadata(source, "gpt-4o"), stored)
    return values


def _metadata(fields: dict[str, Any]) -> dict[str, Any]:
    scaling = fields["rope_scaling"]
    found = {
        "block_count": fields["num_hidden_layers"], "context_length": fields["max_position_embeddings"],
        "embedding_length": fields["hidden_size"], "feed_forward_length": fields["intermediate_size"],
        "attention.head_count": fields["num_attention_heads"],
        "attention.head_count_kv": fields["num_key_value_heads"],
        "attention.key_length": fields["head_dim"], "attention.value_length": fields["head_dim"],
        "attention.layer_norm_rms_epsilon": fields["rms_norm_eps"], "rope.freq_base": fields["rope_theta"],
        "attention.sliding_window": fields["sliding_window"], "expert_count": fields["num_local_experts"],
        "expert_used_count": fields["num_experts_per_tok"], "expert_feed_forward_length": fields["intermediate_size"],
        "rope.scaling.type": "yarn", "rope.scaling.factor": float(scaling["factor"]),
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
    }  # fmt: skip
    return {"general.architecture": "gpt-oss"} | {f"gpt-oss.{key}": value for key, value in found.items()}
