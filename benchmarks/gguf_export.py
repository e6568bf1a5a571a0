"""A checkpoint in hub layout as a GGUF file with matrices in blocks: ``python -m benchmarks.gguf_export``.

For comparisons of the same weights with llama.cpp. Names, the order of rows and the metadata are those of llama.cpp's
converter, for Llama, Qwen2, Qwen3, Qwen3-MoE, Mixtral, DeepSeek and Gemma 3; blocks are rounded to the nearest
numbers. Memory: the whole checkpoint.

    python -m benchmarks.gguf_export --source DIR --output model-q4_0.gguf --type Q4_0
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks import report
from benchmarks.gguf_blocks import blocks_of, type_for
from moe_engine.models.checkpoint.tensor_header import BLOCK_TYPES
from moe_engine.models.checkpoint_files import read_checkpoint

Stored = Mapping[str, tuple[str, tuple[int, ...], bytes]]
"""Name in the GGUF file -> type, shape in torch's order, data."""

NUMBERS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ3_S": 21, "IQ4_XS": 23, "BF16": 30,
    "MXFP4": 39,
}  # fmt: skip
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "gemma3": "gemma3",
    "gemma3_text": "gemma3",
}  # fmt: skip
_MODULES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
_GEMMA3 = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_EXPERT = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip


def reorder(weight: Tensor, heads: int) -> Tensor:
    """Rows in llama.cpp's order for Llama's q and k."""
    return weight.view(heads, 2, len(weight) // heads // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(value: Any) -> bytes:
    """A metadata value with its type."""
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if not value or isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    kind, code = (6, "f") if isinstance(value[0], float) else (5, "i")
    return struct.pack(f"<IIQ{len(value)}{code}", 9, kind, len(value), *value)


def write_container(path: Path, metadata: Mapping[str, Any], tensors: Stored) -> Path:
    """Writes the file, tensor after tensor."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + entry(value) for key, value in metadata.items())
    offset = 0
    for name, (kind, shape, content) in tensors.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += text(name) + dims + struct.pack("<IQ", NUMBERS[kind], offset)
        offset += -(-len(content) // 32) * 32
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % 32))
        for _, _, content in tensors.values():
            file.write(content)
            file.write(bytes(-len(content) % 32))
    return path


def gguf_name(name: str, architecture: str = "") -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module, _, kind = name.rpartition(".")
    if module in whole:
        return f"{whole[module]}.{kind}"
    _, _, layer, *rest = module.split(".")
    if "experts" in rest and rest[-1] in _EXPERT:
        return f"blk.{layer}.{_EXPERT[rest[-1]]}.{kind}"
    if kind == "e_score_correction_bias":
        return f"blk.{layer}.exp_probs_b.bias"
    modules = _MODULES | (_GEMMA3 if architecture == "gemma3" else {})
    return f"blk.{layer}.{modules['.'.join(rest)]}.{kind}"


def stored_norm(name: str, tensor: Tensor, architecture: str) -> Tensor:
    """Gemma 3's norms with the 1 that its layers add; other tensors unchanged."""
    return tensor.float() + 1 if architecture == "gemma3" and name.endswith("norm.weight") else tensor


def metadata_of(fields: Mapping[str, Any], kind: str) -> dict[str, Any]:
    name = ARCHITECTURES[kind]
    found: dict[str, Any] = {
        "context_length": fields["max_position_embeddings"], "embedding_length": fields["hidden_size"],
        "block_count": fields["num_hidden_layers"], "feed_forward_length": fields["intermediate_size"],
        "attention.head_count": fields["num_attention_heads"],
        "attention.head_count_kv": fields["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": fields["rms_norm_eps"], "rope.freq_base": fields["rope_theta"],
    }  # fmt: skip
    if "head_dim" in fields:
        found |= {"attention.key_length": fields["head_dim"], "attention.value_length": fields["head_dim"]}
    experts = fields.get("n_routed_experts") or fields.get("num_experts") or fields.get("num_local_experts")
    if experts:
        found |= {"expert_count": experts, "expert_used_count": fields["num_experts_per_tok"]}
        found["expert_feed_forward_length"] = fields.get("moe_intermediate_size", fields["intermediate_size"])
    if name == "gemma3":
        found |= {
            "attention.sliding_window": fields["sliding_window"],
            "attention.sliding_window_pattern": fields["sliding_window_pattern"],
            "rope.freq_base_swa": fields["rope_local_base_freq"], "rope.scaling.type": "linear",
            "rope.scaling.factor": float(fields["rope_scaling"]["factor"]),
        }  # fmt: skip
    if name == "deepseek2":
        found |= {
            "attention.kv_lora_rank": fields["kv_lora_rank"], "rope.dimension_count": fields["qk_rope_head_dim"],
            "attention.key_length": fields["kv_lora_rank"] + fields["qk_rope_head_dim"],
            "attention.value_length": fields["kv_lora_rank"],
            "attention.key_length_mla": fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"],
            "attention.value_length_mla": fields["v_head_dim"], "attention.head_count_kv": 1,
            "expert_shared_count": fields["n_shared_experts"],
            "leading_dense_block_count": fields["first_k_dense_replace"],
            "expert_weights_scale": fields["routed_scaling_factor"], "expert_weights_norm": fields["norm_topk_prob"],
            "expert_gating_func": 2 if fields["scoring_func"] == "sigmoid" else 1,
            "expert_group_count": fields["n_group"], "expert_group_used_count": fields["topk_group"],
        }  # fmt: skip
        if (yarn := fields.get("rope_scaling")) is not None:
            found |= {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": float(yarn["factor"]),
                "rope.scaling.original_context_length": yarn["original_max_position_embeddings"],
                "rope.scaling.yarn_log_multiplier": 0.1 * yarn["mscale_all_dim"],
            }
        if fields["q_lora_rank"] is not None:
            found["attention.q_lora_rank"] = fields["q_lora_rank"]
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in found.items()}


def tokenizer_metadata(folder: Path, pre: str = "default") -> dict[str, Any]:
    """Metadata of a byte-level tokenizer.json beside the weights; {} without one."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return {}
    made, config = json.loads(file.read_text()), json.loads((folder / "tokenizer_config.json").read_text())
    special = {token["id"]: token for token in made["added_tokens"]}
    vocab = dict(made["model"]["vocab"]) | {token["content"]: number for number, token in special.items()}
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in made["model"]["merges"]]
    kinds = [1 if i not in special else 3 if special[i]["special"] else 4 for i in range(len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges, "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": vocab[_token(config["bos_token"])],
        "tokenizer.ggml.eos_token_id": vocab[_token(config["eos_token"])],
        "tokenizer.ggml.add_bos_token": config["add_bos_token"], "tokenizer.chat_template": config["chat_template"],
    }  # fmt: skip


def _token(value: str | Mapping[str, Any]) -> str:
    """The text of a token in tokenizer_config.json."""
    return value if isinstance(value, str) else value["content"]


def gguf_tensors(tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by their names in the GGUF file, in its order of rows, the experts of a layer in one."""
    experts: dict[str, dict[int, Tensor]] = {}
    architecture = ARCHITECTURES[fields["model_type"]]
    for name, tensor in sorted(tensors.items()):
        own = gguf_name(name, architecture)
        if ".experts." in name:
            experts.setdefault(own, {})[int(name.split(".experts.")[1].split(".")[0])] = tensor
        elif ".kv_b_proj." in name:
            heads = tensor.unflatten(0, (fields["num_attention_heads"], -1))
            keys, values = heads.split([fields["qk_nope_head_dim"], fields["v_head_dim"]], 1)
            yield own.replace("kv_b", "k_b"), keys.transpose(1, 2).contiguous()
            yield own.replace("kv_b", "v_b"), values.contiguous()
        else:
            heads_of = permuted_heads(name, fields)
            tensor = stored_norm(name, tensor, architecture)
            yield own, tensor if heads_of is None else reorder(tensor, heads_of)
    for own, parts in experts.items():
        yield own, torch.stack([parts[i] for i in range(len(parts))])


def permuted_heads(name: str, fields: Mapping[str, Any]) -> int | None:
    """Heads of a projection whose rows llama.cpp reorders; None: rows keep their order."""
    module = name.split(".")[-2]
    if ARCHITECTURES[fields["model_type"]] != "llama" or module not in ("q_proj", "k_proj"):
        return None
    found: int = fields["num_attention_heads" if module == "q_proj" else "num_key_value_heads"]
    return found


def export(source: Path, path: Path, kind: str) -> Path:
    """Writes the file; embedding, head and matrices in blocks (`type_for`), vectors and routers in F32."""
    fields = json.loads((source / "config.json").read_text())
    files = {file.path for file in read_checkpoint(source).values()}
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    layers = fields["num_hidden_layers"]
    tensors = {name: t for name, t in tensors.items() if not name.startswith(f"model.layers.{layers}.")}  # MTP
    stored = {}
    for name, tensor in gguf_tensors(tensors, fields):
        plain = "F32" if tensor.dim() == 1 or "gate_inp" in name else type_for(kind, tensor.shape[-1])
        array = tensor.float().numpy()
        if plain == "BF16":
            data = tensor.bfloat16().view(torch.int16).numpy().tobytes()
        elif plain in BLOCK_TYPES:
            data = blocks_of(plain, array.reshape(-1, array.shape[-1])).tobytes()
        else:
            data = array.astype("<f2" if plain == "F16" else "<f4").tobytes()
        stored[name] = (plain, tuple(tensor.shape), data)
    part = path.with_suffix(".part")
    write_container(part, metadata_of(fields, fields["model_type"]) | tokenizer_metadata(source), stored)
    return part.rename(path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.command_parser("gguf_export", __doc__)
    parser.add_argument("--source", type=Path, required=True, help="checkpoint in hub layout, unquantized")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--type", choices=("BF16", *BLOCK_TYPES), default="Q4_0")
    own = parser.parse_args(argv)
    print(export(own.source, own.output, own.type))
    return 0


if __name__ == "__main__":
    sys.exit(main())
