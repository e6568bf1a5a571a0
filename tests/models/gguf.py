"""GGUF files of tiny checkpoints: a writer, and the definition of the block types, number by number.

Names, the order of rows and the metadata are those of llama.cpp's converter. The values of a written file are
transformers' dequantization.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.integrations.gguf import dequant

from benchmarks.gguf_blocks import blocks_of
from benchmarks.gguf_export import (
    ARCHITECTURES,
    NUMBERS,
    gguf_name,
    metadata_of,
    reorder,
    stored_norm,
    tokenizer_metadata,
    write_container,
)
from moe_engine.models.checkpoint.tensor_header import BLOCK_TYPES

UNKNOWN_THERE = ("Q5_0", "Q5_1", "MXFP4")
"""Types that transformers does not read."""
__all__ = ["NUMBERS", "gguf_name", "tokenizer_metadata", "write_container"]


quantize = blocks_of
"""float32 [N, K] -> blocks uint8 [N, bytes]."""


def dequantize(kind: str, blocks: np.ndarray) -> np.ndarray:
    """uint8 [N, bytes] -> float32 [N, K], number by number by ggml's definitions."""
    count = BLOCK_TYPES[kind][1]
    one = {
        "Q4_0": _of_q4_0, "Q4_1": _of_q4_1, "Q5_0": _of_q5_0, "Q5_1": _of_q5_1, "Q8_0": _of_q8_0, "Q2_K": _of_q2_k,
        "Q3_K": _of_q3_k, "Q4_K": _of_q4_k, "Q5_K": _of_q5_k, "Q6_K": _of_q6_k, "IQ4_NL": _of_iq4_nl,
        "IQ4_XS": _of_iq4_xs, "MXFP4": _of_mxfp4,
    }[kind]  # fmt: skip
    flat = blocks.reshape(-1, count)
    return np.stack([one(block) for block in flat]).reshape(len(blocks), -1).astype(np.float32)


def _float(block: np.ndarray, start: int) -> float:
    return float(block[start : start + 2].copy().view("<f2")[0])


def _of_q4_0(b: np.ndarray) -> list[float]:
    codes = [int(byte) & 15 for byte in b[2:]] + [int(byte) >> 4 for byte in b[2:]]
    return [_float(b, 0) * (code - 8) for code in codes]


def _of_q8_0(b: np.ndarray) -> list[float]:
    return [_float(b, 0) * int(code) for code in b[2:].view(np.int8)]


def _of_q4_1(b: np.ndarray) -> list[float]:
    codes = [int(byte) & 15 for byte in b[4:]] + [int(byte) >> 4 for byte in b[4:]]
    return [_float(b, 0) * code + _float(b, 2) for code in codes]


def _of_q5_0(b: np.ndarray) -> list[float]:
    codes = [int(byte) & 15 for byte in b[6:]] + [int(byte) >> 4 for byte in b[6:]]
    bits = int.from_bytes(b[2:6].tobytes(), "little")
    return [_float(b, 0) * ((code | (bits >> j & 1) << 4) - 16) for j, code in enumerate(codes)]


def _of_q5_1(b: np.ndarray) -> list[float]:
    codes = [int(byte) & 15 for byte in b[8:]] + [int(byte) >> 4 for byte in b[8:]]
    bits = int.from_bytes(b[4:8].tobytes(), "little")
    return [_float(b, 0) * (code | (bits >> j & 1) << 4) + _float(b, 2) for j, code in enumerate(codes)]


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _of_iq4_nl(b: np.ndarray) -> list[float]:
    return [_float(b, 0) * _IQ4[int(b[2 + j % 16]) >> 4 * (j // 16) & 15] for j in range(32)]


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def _of_mxfp4(b: np.ndarray) -> list[float]:
    return [2.0 ** (int(b[0]) - 127) * _E2M1[int(b[1 + j % 16]) >> 4 * (j // 16) & 15] for j in range(32)]


def _of_iq4_xs(b: np.ndarray) -> list[float]:
    found, high = [], int.from_bytes(b[2:4].tobytes(), "little")
    for i in range(256):
        run, j = divmod(i, 32)
        factor = int(b[4 + run // 2]) >> 4 * (run % 2) & 15 | (high >> 2 * run & 3) << 4
        code = int(b[8 + 16 * run + j % 16]) >> 4 * (j // 16) & 15
        found.append(np.float32(_float(b, 0)) * np.float32(factor - 32) * np.float32(_IQ4[code]))
    return found


def _of_q2_k(b: np.ndarray) -> list[float]:
    found = []
    for i in range(256):
        code = int(b[16 + 32 * (i // 128) + i % 32]) >> 2 * (i % 128 // 32) & 3
        factor, offset = int(b[i // 16]) & 15, int(b[i // 16]) >> 4
        step, base = np.float32(_float(b, 80)) * factor, np.float32(_float(b, 82)) * offset
        found.append(np.float32(step) * code - np.float32(base))
    return found


def _of_q3_k(b: np.ndarray) -> list[float]:
    found = []
    for i in range(256):
        group = i // 16
        code = int(b[32 + 32 * (i // 128) + i % 32]) >> 2 * (i % 128 // 32) & 3
        third = int(b[i % 32]) >> i // 32 & 1
        low = int(b[96 + group % 8]) >> 4 * (group // 8) & 15
        high = int(b[104 + group % 4]) >> 2 * (group // 4) & 3
        factor = (low | high << 4) - 32
        found.append(np.float32(_float(b, 108)) * np.float32(factor) * np.float32(code + 4 * third - 4))
    return found


def _of_q5_k(b: np.ndarray) -> list[float]:
    return _of_q4_k(np.concatenate((b[:16], b[48:])), b[16:48])


def _of_q4_k(b: np.ndarray, high: np.ndarray | None = None) -> list[float]:
    """`high`: the fifth bits of Q5_K, a byte for each place of a run."""
    pairs, found = [int(byte) for byte in b[4:16]], []
    for j in range(8):
        if j < 4:
            factor, offset = pairs[j] & 63, pairs[j + 4] & 63
        else:
            factor = pairs[j + 4] & 15 | pairs[j - 4] >> 6 << 4
            offset = pairs[j + 4] >> 4 | pairs[j] >> 6 << 4
        run = b[16 + 32 * (j // 2) :][:32]
        codes = [int(byte) >> 4 if j % 2 else int(byte) & 15 for byte in run]
        if high is not None:
            codes = [code | (int(bits) >> j & 1) << 4 for code, bits in zip(codes, high)]
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


def write_gguf(
    source: Path, path: Path, kind: str, type_of: Callable[[str], str], split_kv_b: bool = False
) -> dict[str, Tensor]:
    """A checkpoint in hub layout as a GGUF file; returns its tensors with the values of the file.

    Args:
        type_of: name in the GGUF file -> type of a matrix; one without whole blocks is stored as F16.
    """
    fields = json.loads((source / "config.json").read_text())
    found, stored, values = load_file(source / "model.safetensors"), {}, {}
    experts: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in sorted(found.items()):
        own = gguf_name(name, ARCHITECTURES[kind])
        if ".experts." in name:
            experts.setdefault(own, []).append((name, tensor))
            continue
        if split_kv_b and ".kv_b_proj." in name:
            heads = tensor.unflatten(0, (fields["num_attention_heads"], -1))
            keys, rest = heads.split([fields["qk_nope_head_dim"], fields["v_head_dim"]], 1)
            parts = [
                store(stored, own.replace("kv_b", part), value.contiguous(), type_of)
                for part, value in (("k_b", keys.transpose(1, 2)), ("v_b", rest))
            ]
            values[name] = torch.cat((parts[0].transpose(1, 2), parts[1]), 1).flatten(0, 1)
            continue
        heads_of = {"q": "num_attention_heads", "k": "num_key_value_heads"}.get(
            name.split(".")[-2].removesuffix("_proj")
        )
        if ARCHITECTURES[kind] == "llama" and heads_of is not None:
            count = fields[heads_of]
            value = store(stored, own, reorder(tensor, count), type_of)
            rows = torch.empty(len(tensor), dtype=torch.long)
            rows[:] = reorder(torch.arange(len(tensor)), count)
            values[name] = torch.empty_like(value)
            values[name][rows] = value
            continue
        shifted = stored_norm(name, tensor, ARCHITECTURES[kind])
        values[name] = store(stored, own, shifted, type_of) - (0 if shifted is tensor else 1)
    for own, parts in experts.items():
        parts.sort(key=lambda part: int(part[0].split(".experts.")[1].split(".")[0]))
        value = store(stored, own, torch.stack([tensor for _, tensor in parts]), type_of)
        values |= {name: value[i] for i, (name, _) in enumerate(parts)}
    factors = rope_factors(fields)
    if factors is not None:
        stored["rope_freqs.weight"] = ("F32", factors.shape, factors.tobytes())
    write_container(path, metadata_of(fields, kind) | tokenizer_metadata(source), stored)
    return values


def store(stored: dict[str, Any], name: str, tensor: Tensor, type_of: Callable[[str], str]) -> Tensor:
    kind = "F32" if tensor.dim() == 1 or "gate_inp" in name else type_of(name)
    if kind in BLOCK_TYPES and tensor.shape[-1] % BLOCK_TYPES[kind][0]:
        kind = "F16"
    array = tensor.float().numpy()
    if kind in BLOCK_TYPES:
        flat = array.reshape(-1, array.shape[-1])
        blocks = quantize(kind, flat)
        stored[name] = (kind, tuple(tensor.shape), blocks.tobytes())
        if kind in UNKNOWN_THERE:
            return torch.from_numpy(dequantize(kind, blocks)).view(tensor.shape)
        return dequant.dequantize(torch.from_numpy(blocks), NUMBERS[kind]).view(tensor.shape)
    typed = tensor.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]).contiguous()
    stored[name] = (kind, tuple(tensor.shape), typed.flatten().view(torch.uint8).numpy().tobytes())
    return typed.float()


def rope_factors(fields: Mapping[str, Any]) -> np.ndarray | None:
    """The values that llama.cpp's converter stores for Llama 3: the divisor of each frequency."""
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
