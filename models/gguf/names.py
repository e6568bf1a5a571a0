"""Tensors of GGUF files under the names of hub checkpoints. Imports no torch.

Legend: E experts, H heads, N rows, K columns, C kv_lora_rank.

llama.cpp stores the experts of a layer in one tensor [E, N, K]; here each expert is a part of it. In files of the
architecture ``llama`` the rows of a head in q and k are reordered, because llama.cpp rotates adjacent channels: row
2j + a of the file is row a * (rows / 2) + j of a hub checkpoint. DeepSeek's kv_b_proj is stored as attn_k_b [H, C,
nope] (transposed) and attn_v_b [H, v, C] by newer converters. The biases of gate and up of
gpt-oss's experts are two tensors [E, N]; in a hub checkpoint they alternate in one [E, 2 N]. Source: llama.cpp's
convert_hf_to_gguf and gguf-py.
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
    "post_attention_norm": "post_attention_layernorm",
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
_GATES, _UPS, _ALTERNATING = "ffn_gate_exps.bias", "ffn_up_exps.bias", "mlp.experts.gate_up_proj_bias"
_SECONDS = {_KEYS: _VALUES, _GATES: _UPS}
"""Tensors in two parts: the first part's name, and the second's."""
_GPT_OSS = {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp.weight": "mlp.router.weight",
    "ffn_gate_inp.bias": "mlp.router.bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
GEMMA3 = "gemma3"
_GEMMA3 = {"ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
FREQUENCIES = "rope_freqs.weight"
_UNREAD = (FREQUENCIES,)
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_PERMUTED = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")
_MIXTRAL = ("block_sparse_moe", "w1", "w3", "w2")
_MLP = ("mlp", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class JoinedHeader:
    """A tensor in two parts, under their own names in the file: the keys [H, C, nope] and values [H, v, C] of
    kv_b_proj, or, if `alternating`, the biases of gate and up [E, N]."""

    first: TensorHeader
    second: TensorHeader
    alternating: bool = False


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
        self._is_gpt_oss = architecture == "gpt-oss"
        self._layer = _LAYER | (_GEMMA3 if architecture == GEMMA3 else {})
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
            part = info.name.split(".", 2)[-1]
            if info.name in _UNREAD or part in _SECONDS.values():
                continue
            if part in _SECONDS:
                name, header, parts = self._join(info, by_name)
                tensors[name], joined[name] = header, parts
                continue
            for name, header in self._headers(info):
                tensors[name] = header
                if match := _PERMUTED.fullmatch(info.name):
                    count = self._heads.get(match[1])
                    if isinstance(count, int):
                        heads[name] = self._of_heads(info, count)
        return GGUFWeights(self._part.path, tensors, heads=heads, joined=joined)

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
        elif self._is_gpt_oss and part in _GPT_OSS:
            yield f"{prefix}.{_GPT_OSS[part]}", whole
        elif part == _ROUTER:
            yield f"{prefix}.{block}.gate.weight", whole
        elif part in _ROUTER_BIAS:
            yield f"{prefix}.{block}.gate.e_score_correction_bias", whole
        else:
            module, _, kind = part.rpartition(".")
            yield f"{prefix}.{self._layer[module]}.{kind}" if module in self._layer else info.name, whole

    def _join(self, first: TensorInfo, by_name: Mapping[str, TensorInfo]) -> tuple[str, TensorHeader, JoinedHeader]:
        match = _BLOCK.fullmatch(first.name)
        assert match is not None
        second, alternating = by_name.get(f"blk.{match[1]}.{_SECONDS[match[2]]}"), match[2] == _GATES
        shapes = (first.shape, () if second is None else second.shape)
        if second is None or any(len(shape) != 3 - alternating for shape in shapes) or _differ(*shapes):
            raise CheckpointError(
                f"{self._part.path}: {first.name} comes without a matching {_SECONDS[match[2]]} in the same file"
            )
        parts = JoinedHeader(self._header(first), self._header(second), alternating)
        if alternating:
            name, shape = _ALTERNATING, (first.shape[0], 2 * first.shape[1])
        else:
            (heads, columns, nope), width = first.shape, second.shape[1]
            name, shape = _JOINED, (heads * (nope + width), columns)
        header = TensorHeader("F32", shape, 0, parts.first.num_bytes + parts.second.num_bytes)
        return f"model.layers.{match[1]}.{name}", header, parts

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


def _differ(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """True if [H, C, nope] and [H, v, C], or [E, N] and [E, N], do not belong together."""
    return first[:2] != (second[0], second[-1])
