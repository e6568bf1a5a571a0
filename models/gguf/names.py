"""Tensors of GGUF files under the names of hub checkpoints. Imports no torch.

Legend: E experts, H heads, N rows, K columns, C kv_lora_rank.

llama.cpp stores the experts of a layer in one tensor [E, N, K]; here each expert is a part of it. In files of the
architecture ``llama`` the rows of a head in q and k are reordered, because llama.cpp rotates adjacent channels: row
2j + a of the file is row a * (rows / 2) + j of a hub checkpoint. DeepSeek's kv_b_proj is stored as attn_k_b [H, C,
nope] (transposed) and attn_v_b [H, v, C] by newer converters. Source: llama.cpp's convert_hf_to_gguf and gguf-py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from moe_engine.errors import CheckpointError
from moe_engine.gguf_container import Container, TensorInfo, parts_of, read_container
from moe_engine.models.gguf.types import type_name
from moe_engine.models.tensor_header import BLOCK_TYPES, ELEMENT_BYTES, TensorHeader, WeightFile

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_ROUTER = "ffn_gate_inp.weight"
_ROUTER_BIAS = ("exp_probs_b.bias", "exp_probs_b")
_EXPERTS = {"ffn_gate_exps.weight": 0, "ffn_up_exps.weight": 1, "ffn_down_exps.weight": 2}
_KEYS, _VALUES, _JOINED = "attn_k_b.weight", "attn_v_b.weight", "self_attn.kv_b_proj.weight"
FREQUENCIES = "rope_freqs.weight"
_UNREAD = (FREQUENCIES,)
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_PERMUTED = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")
_MIXTRAL = ("block_sparse_moe", "w1", "w3", "w2")
_MLP = ("mlp", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class JoinedHeader:
    """kv_b_proj in two tensors: `keys` [H, C, nope] and `values` [H, v, C], under their own names in the file."""

    keys: TensorHeader
    values: TensorHeader


@dataclass(frozen=True)
class GGUFWeights(WeightFile):
    """A GGUF file.

    Attributes:
        heads: tensors whose rows are reordered within each head, with their number of heads.
        joined: tensors that are stored in two parts.
    """

    heads: Mapping[str, int] = field(default_factory=dict)
    joined: Mapping[str, JoinedHeader] = field(default_factory=dict)


def read_gguf(path: Path) -> dict[str, WeightFile]:
    """Tensor name -> its file, as `read_checkpoint`.

    Raises:
        CheckpointError: a damaged or missing file, or a tensor of a type that is not served.
    """
    files: dict[str, WeightFile] = {}
    parts = [read_container(part) for part in parts_of(path)]
    metadata = parts[0].metadata
    for part in parts:
        file = _Names(part, metadata).file()
        if twice := next((name for name in file.tensors if name in files), None):
            raise CheckpointError(f"{part.path}: {twice} is in {files[twice].path.name} too; download both again")
        files |= dict.fromkeys(file.tensors, file)
    return files


class _Names:
    """The tensors of one file.

    Args:
        metadata: metadata of the model's first file.
    """

    def __init__(self, part: Container, metadata: Mapping[str, object]) -> None:
        self._part = part
        architecture = metadata.get("general.architecture")
        self._heads = {}
        if architecture == "llama":
            queries = metadata.get("llama.attention.head_count")
            self._heads = {"q": queries, "k": metadata.get("llama.attention.head_count_kv", queries)}
        mixture = architecture == "llama" and metadata.get("llama.expert_count")
        self._experts = _MIXTRAL if mixture else _MLP

    def file(self) -> GGUFWeights:
        tensors: dict[str, TensorHeader] = {}
        heads: dict[str, int] = {}
        by_name = {info.name: info for info in self._part.tensors}
        if len(by_name) < len(self._part.tensors):
            raise CheckpointError(f"{self._part.path}: has several tensors of the same name; download it again")
        joined = {}
        for info in by_name.values():
            if info.name in _UNREAD or info.name.endswith(f".{_VALUES}"):
                continue
            if info.name.endswith(f".{_KEYS}"):
                name, header, parts = self._join(info, by_name)
                tensors[name], joined[name] = header, parts
                continue
            for name, header in self._headers(info):
                tensors[name] = header
                if match := _PERMUTED.fullmatch(info.name):
                    count = self._heads.get(match[1])
                    if isinstance(count, int):
                        heads[name] = self._of_heads(info, count)
        return GGUFWeights(self._part.path, tensors, heads, joined)

    def _of_heads(self, info: TensorInfo, count: int) -> int:
        """The number of heads, whose rows must be pairs."""
        if count < 1 or info.shape[0] % (2 * count):
            raise CheckpointError(
                f"{self._part.path}: {info.name} {list(info.shape)} has no pairs of rows for each of {count} heads "
                "(llama.attention.head_count); download it again"
            )
        return count

    def _headers(self, info: TensorInfo) -> Iterator[tuple[str, TensorHeader]]:
        """The hub's names of a tensor; unknown names are kept, and the header check refuses them."""
        whole, match = self._header(info), _BLOCK.fullmatch(info.name)
        if match is None:
            yield _WHOLE.get(info.name, info.name), whole
            return
        prefix, part = f"model.layers.{match[1]}", match[2]
        block = self._experts[0]
        if part in _EXPERTS and len(info.shape) == 3:
            size = whole.num_bytes // max(1, info.shape[0])
            projection = self._experts[1 + _EXPERTS[part]]
            for expert in range(info.shape[0]):
                start = whole.start + expert * size
                header = TensorHeader(whole.dtype, info.shape[1:], start, start + size)
                yield f"{prefix}.{block}.experts.{expert}.{projection}.weight", header
        elif part == _ROUTER:
            yield f"{prefix}.{block}.gate.weight", whole
        elif part in _ROUTER_BIAS:
            yield f"{prefix}.{block}.gate.e_score_correction_bias", whole
        else:
            module, _, kind = part.rpartition(".")
            yield f"{prefix}.{_LAYER[module]}.{kind}" if module in _LAYER else info.name, whole

    def _join(self, keys: TensorInfo, by_name: Mapping[str, TensorInfo]) -> tuple[str, TensorHeader, JoinedHeader]:
        match = _BLOCK.fullmatch(keys.name)
        other = by_name.get(keys.name.replace(_KEYS, _VALUES))
        shapes = (keys.shape, () if other is None else other.shape)
        if match is None or other is None or any(len(shape) != 3 for shape in shapes) or _differ(*shapes):
            raise CheckpointError(f"{self._part.path}: {keys.name} comes without a matching {_VALUES} in the same file")
        parts = JoinedHeader(self._header(keys), self._header(other))
        (heads, columns, nope), width = keys.shape, other.shape[1]
        size = parts.keys.num_bytes + parts.values.num_bytes
        header = TensorHeader("F32", (heads * (nope + width), columns), 0, size)
        return f"model.layers.{match[1]}.{_JOINED}", header, parts

    def _header(self, info: TensorInfo) -> TensorHeader:
        path = str(self._part.path)
        dtype = type_name(info.type, info.name, path)
        numbers, size = BLOCK_TYPES.get(dtype) or (1, ELEMENT_BYTES[dtype])
        if not info.shape or 0 in info.shape or info.shape[-1] % numbers:
            raise CheckpointError(f"{path}: {info.name} {list(info.shape)} has no whole blocks of {dtype}")
        stop = info.start + prod(info.shape) // numbers * size
        if stop > self._part.size:
            raise CheckpointError(
                f"{path}: truncated: tensor {info.name} ends at byte {stop}, the file has {self._part.size}; download "
                "it again"
            )
        return TensorHeader(dtype, info.shape, info.start, stop)


def _differ(keys: tuple[int, ...], values: tuple[int, ...]) -> bool:
    """True if [H, C, nope] and [H, v, C] have other heads or widths."""
    return keys[:2] != (values[0], values[2])
