"""GGUF files of tiny checkpoints: a writer, and the definition of the block types, number by number.

Names, the order of rows and the metadata are those of llama.cpp's converter. The values of a written file are
transformers' dequantization.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.integrations.gguf import dequant

NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30, "Q5_K": 13}
BLOCK = {"Q4_0": (32, 18), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q6_K": (256, 210)}
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
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
_EXPERT = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip


def half(values: np.ndarray) -> np.ndarray:
    """Bytes of float16, the last dimension becoming 2."""
    return values.astype("<f2")[..., None].view(np.uint8)


def quantize(kind: str, weight: np.ndarray) -> np.ndarray:
    """float32 [N, K] -> blocks uint8 [N, bytes]."""
    size, _ = BLOCK[kind]
    blocks = weight.reshape(-1, size).astype(np.float32)
    made: np.ndarray = {"Q4_0": _q4_0, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k}[kind](blocks)
    return made.reshape(len(weight), -1)


def _q4_0(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max(-1) / 7 + 1e-8
    codes = np.clip(np.round(x / scale[:, None]) + 8, 0, 15).astype(np.uint8)
    return np.concatenate((half(scale), codes[:, :16] | codes[:, 16:] << 4), -1)


def _q8_0(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max(-1) / 127 + 1e-8
    return np.concatenate((half(scale), np.round(x / scale[:, None]).astype(np.int8).view(np.uint8)), -1)


def _q4_k(x: np.ndarray) -> np.ndarray:
    parts = x.reshape(-1, 8, 32)
    low = np.maximum(-parts.min(-1), 0)
    wide = (parts.max(-1) + low) / 15 + 1e-8
    scale, offset = wide.max(-1) / 63, low.max(-1) / 63 + 1e-8
    factors = np.clip(np.round(wide / scale[:, None]), 1, 63).astype(np.uint8)
    offsets = np.clip(np.round(low / offset[:, None]), 0, 63).astype(np.uint8)
    steps = scale[:, None, None] * factors[..., None]
    codes = np.clip(np.round((parts + (offset[:, None] * offsets)[..., None]) / steps), 0, 15).astype(np.uint8)
    first = factors[:, :4] | factors[:, 4:] >> 4 << 6
    second = offsets[:, :4] | offsets[:, 4:] >> 4 << 6
    third = factors[:, 4:] & 15 | (offsets[:, 4:] & 15) << 4
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(len(x), 128)
    return np.concatenate((half(scale), half(offset), first, second, third, packed), -1)


def _q6_k(x: np.ndarray) -> np.ndarray:
    parts = x.reshape(-1, 16, 16)
    wide = np.abs(parts).max(-1) / 31 + 1e-8
    scale = wide.max(-1) / 127
    factors = np.clip(np.round(wide / scale[:, None]), 1, 127).astype(np.int8)
    steps = scale[:, None, None] * factors[..., None]
    codes = (np.clip(np.round(parts / steps), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4  # [blocks, 2, 2, 32]
    high = sum(codes[:, :, i] >> 4 << 2 * i for i in range(4))
    flat = (low.reshape(len(x), 128), np.asarray(high, np.uint8).reshape(len(x), 64))
    return np.concatenate((*flat, factors.view(np.uint8), half(scale)), -1)


def dequantize(kind: str, blocks: np.ndarray) -> np.ndarray:
    """uint8 [N, bytes] -> float32 [N, K], number by number as ggml's definitions give them."""
    count = BLOCK[kind][1]
    one = {"Q4_0": _of_q4_0, "Q8_0": _of_q8_0, "Q4_K": _of_q4_k, "Q6_K": _of_q6_k}[kind]
    flat = blocks.reshape(-1, count)
    return np.stack([one(block) for block in flat]).reshape(len(blocks), -1).astype(np.float32)


def _float(block: np.ndarray, start: int) -> float:
    return float(block[start : start + 2].copy().view("<f2")[0])


def _of_q4_0(b: np.ndarray) -> list[float]:
    codes = [int(byte) & 15 for byte in b[2:]] + [int(byte) >> 4 for byte in b[2:]]
    return [_float(b, 0) * (code - 8) for code in codes]


def _of_q8_0(b: np.ndarray) -> list[float]:
    return [_float(b, 0) * int(code) for code in b[2:].view(np.int8)]


def _of_q4_k(b: np.ndarray) -> list[float]:
    pairs, found = [int(byte) for byte in b[4:16]], []
    for j in range(8):
        if j < 4:
            factor, offset = pairs[j] & 63, pairs[j + 4] & 63
        else:
            factor = pairs[j + 4] & 15 | pairs[j - 4] >> 6 << 4
            offset = pairs[j + 4] >> 4 | pairs[j] >> 6 << 4
        run = b[16 + 32 * (j // 2) :][:32]
        codes = [int(byte) >> 4 if j % 2 else int(byte) & 15 for byte in run]
        step, base = np.float32(_float(b, 0)) * factor, np.float32(_float(b, 2)) * offset
        found += [np.float32(step) * code - np.float32(base) for code in codes]
    return found


def _of_q6_k(b: np.ndarray) -> list[float]:
    scale, found = np.float32(_float(b, 208)), []
    for i in range(256):
        part, within = divmod(i, 128)
        run, place = divmod(within, 32)
        low = int(b[64 * part + 32 * (run % 2) + place]) >> 4 * (run // 2) & 15
        high = int(b[128 + 32 * part + place]) >> 2 * run & 3
        factor = int(b[192 + i // 16 : 193 + i // 16].view(np.int8)[0])
        found.append(scale * np.float32(factor) * np.float32((low | high << 4) - 32))
    return found


def reorder(weight: Tensor, heads: int) -> Tensor:
    """Rows as llama.cpp's converter orders those of Llama's q and k."""
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
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    kind, code = (6, "f") if value and isinstance(value[0], float) else (5, "i")
    return struct.pack(f"<IIQ{len(value)}{code}", 9, kind, len(value), *value)


def write_container(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]
) -> Path:
    """tensors: name -> type, shape in torch's order, data."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + entry(value) for key, value in metadata.items())
    data = b""
    for name, (kind, shape, content) in tensors.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += text(name) + dims + struct.pack("<IQ", NUMBERS[kind], len(data))
        data += content + bytes(-len(content) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def write_gguf(
    source: Path, path: Path, kind: str, type_of: Callable[[str], str], split_kv_b: bool = False
) -> dict[str, Tensor]:
    """A checkpoint in hub layout as a GGUF file; returns its tensors with the values that the file has.

    Args:
        type_of: name in the GGUF file -> type of a matrix; one without whole blocks is stored as F16.
    """
    fields = json.loads((source / "config.json").read_text())
    found, stored, values = load_file(source / "model.safetensors"), {}, {}
    experts: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in sorted(found.items()):
        own = gguf_name(name)
        if ".experts." in name:
            experts.setdefault(own, []).append((name, tensor))
            continue
        if split_kv_b and ".kv_b_proj." in name:
            heads = tensor.unflatten(0, (fields["num_attention_heads"], -1))
            keys, rest = heads.split([fields["qk_nope_head_dim"], fields["v_head_dim"]], 1)
            parts = [
                _store(stored, own.replace("kv_b", part), value.contiguous(), type_of)
                for part, value in (("k_b", keys.transpose(1, 2)), ("v_b", rest))
            ]
            values[name] = torch.cat((parts[0].transpose(1, 2), parts[1]), 1).flatten(0, 1)
            continue
        heads_of = {"q": "num_attention_heads", "k": "num_key_value_heads"}.get(
            name.split(".")[-2].removesuffix("_proj")
        )
        if ARCHITECTURES[kind] == "llama" and heads_of is not None:
            count = fields[heads_of]
            value = _store(stored, own, reorder(tensor, count), type_of)
            rows = torch.empty(len(tensor), dtype=torch.long)
            rows[:] = reorder(torch.arange(len(tensor)), count)
            values[name] = torch.empty_like(value)
            values[name][rows] = value
            continue
        values[name] = _store(stored, own, tensor, type_of)
    for own, parts in experts.items():
        parts.sort(key=lambda part: int(part[0].split(".experts.")[1].split(".")[0]))
        value = _store(stored, own, torch.stack([tensor for _, tensor in parts]), type_of)
        values |= {name: value[i] for i, (name, _) in enumerate(parts)}
    factors = rope_factors(fields)
    if factors is not None:
        stored["rope_freqs.weight"] = ("F32", factors.shape, factors.tobytes())
    write_container(path, metadata_of(fields, kind) | tokenizer_metadata(source), stored)
    return values


def _store(stored: dict[str, Any], name: str, tensor: Tensor, type_of: Callable[[str], str]) -> Tensor:
    kind = "F32" if tensor.dim() == 1 or "gate_inp" in name else type_of(name)
    if kind in BLOCK and tensor.shape[-1] % BLOCK[kind][0]:
        kind = "F16"
    array = tensor.float().numpy()
    if kind in BLOCK:
        flat = array.reshape(-1, array.shape[-1])
        blocks = quantize(kind, flat)
        stored[name] = (kind, tuple(tensor.shape), blocks.tobytes())
        return dequant.dequantize(torch.from_numpy(blocks), NUMBERS[kind]).view(tensor.shape)
    typed = tensor.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]).contiguous()
    stored[name] = (kind, tuple(tensor.shape), typed.flatten().view(torch.uint8).numpy().tobytes())
    return typed.float()


def gguf_name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module, _, kind = name.rpartition(".")
    if module in whole:
        return f"{whole[module]}.{kind}"
    _, _, layer, *rest = module.split(".")
    if "experts" in rest and rest[-1] in _EXPERT:
        return f"blk.{layer}.{_EXPERT[rest[-1]]}.{kind}"
    if kind == "e_score_correction_bias":
        return f"blk.{layer}.exp_probs_b.bias"
    return f"blk.{layer}.{_MODULES['.'.join(rest)]}.{kind}"


def rope_factors(fields: Mapping[str, Any]) -> np.ndarray | None:
    """What llama.cpp's converter stores for Llama 3: by how much each frequency is divided."""
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if scaling.get("rope_type") != "llama3":
        return None
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(**{k: v for k, v in fields.items() if k not in ("architectures", "model_type")})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    width = fields["hidden_size"] // fields["num_attention_heads"]
    plain = fields["rope_theta"] ** -(torch.arange(0, width, 2).float() / width)
    return (plain / scaled).float().numpy()


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
            "rope.scaling.type": "yarn", "rope.scaling.factor": float(fields["rope_scaling"]["factor"]),
            "rope.scaling.original_context_length": fields["rope_scaling"]["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * fields["rope_scaling"]["mscale_all_dim"],
        }  # fmt: skip
        if fields["q_lora_rank"] is not None:
            found["attention.q_lora_rank"] = fields["q_lora_rank"]
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in found.items()}


def tokenizer_metadata(folder: Path, pre: str = "default") -> dict[str, Any]:
    """Of a byte-level tokenizer.json beside the weights; {} without one."""
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
        "tokenizer.ggml.merges": merges or ["Ġ Ġ"][:0], "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": vocab[config["bos_token"]],
        "tokenizer.ggml.eos_token_id": vocab[config["eos_token"]],
        "tokenizer.ggml.add_bos_token": config["add_bos_token"], "tokenizer.chat_template": config["chat_template"],
    }  # fmt: skip
