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
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from moe_engine.errors import CheckpointError
from moe_engine.gguf_container import Container, TensorInfo, parts_of, read_container
from moe_engine.models.checkpoint.tensor_header import BLOCK_TYPES, ELEMENT_BYTES, TensorHeader, WeightFile
from moe_engine.models.gguf.families import (
    ERNIE,
    HALVES,
    JOINED,
    LAST,
    LAYER,
    OTHERS,
    OUTPUT,
    PERMUTED,
    RATES,
    REST,
    SHAPES,
    STATE,
    WITHOUT_END,
    Order,
    expert_names,
    orders,
)
from moe_engine.models.gguf.keys import ROTARY
from moe_engine.models.gguf.types import type_name

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROUTER = "ffn_gate_inp.weight"
_EXPERTS = {
    "ffn_gate_exps.weight": (0,), "ffn_up_exps.weight": (1,), "ffn_down_exps.weight": (2,),
    "ffn_gate_up_exps.weight": (0, 1),
}  # fmt: skip
"""The matrices of each expert in a tensor."""
_QKV = ".attn_qkv.weight"
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
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_PERMUTED = re.compile(r"blk\.(\d+)\.attn_([qk])\.(weight|bias)")


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
        orders, columns: orders of rows, and of columns, that differ from the hub's.
        rates: A_log of layers with a state, stored as -exp(A_log).
        joined: tensors that are stored in two parts.
    """

    orders: dict[str, Order] = field(default_factory=dict)
    columns: dict[str, Order] = field(default_factory=dict)
    rates: set[str] = field(default_factory=set)
    joined: dict[str, JoinedHeader] = field(default_factory=dict)

    def has_moved_blocks(self, name: str) -> bool:
        """True for a matrix whose columns have another order, which splits its blocks."""
        order, dtype = self.columns.get(name), self.tensors[name].dtype
        return order is not None and dtype in BLOCK_TYPES and order.each % BLOCK_TYPES[dtype][0] != 0


def read_gguf(path: Path) -> Mapping[str, GGUFWeights]:
    """Tensor name -> its file, as `read_checkpoint`.

    Raises:
        CheckpointError: a damaged or missing file, or a tensor of a type that is not served.
    """
    files: dict[str, GGUFWeights] = {}
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

    def __init__(self, part: Container, metadata: Mapping[str, Any]) -> None:
        self._part, self._metadata = part, metadata
        self._architecture = str(metadata.get("general.architecture"))
        self._modules = LAYER | OTHERS.get(self._architecture, {})
        self._without_end = WITHOUT_END | (ERNIE if self._architecture == "ernie4_5-moe" else {})
        self._block, self._router, *self._experts = expert_names(self._architecture, metadata)
        self._orders = orders(self._architecture, partial(self._number, 0))

    def file(self) -> GGUFWeights:
        by_name = {info.name: info for info in self._part.tensors}
        if len(by_name) < len(self._part.tensors):
            raise CheckpointError(f"{self._part.path}: has several tensors of the same name; download it again")
        file = GGUFWeights(self._part.path, {})
        for info in by_name.values():
            part = info.name.split(".", 2)[-1]
            if info.name in ROTARY or part in _SECONDS.values():
                continue
            if part in _SECONDS:
                name, file.tensors[name], file.joined[name] = self._join(info, by_name)
                continue
            for name, header in self._headers(info):
                file.tensors[name] = header
                self._add_orders(file, info, name)
        return file

    def _number(self, layer: int, key: str) -> int:
        """A number of the metadata, or 0; of a list the layer's."""
        found = self._metadata.get(f"{self._architecture}.{key}", 0)
        if isinstance(found, tuple):
            found = found[layer] if layer < len(found) else 0
        return found if isinstance(found, int) else 0

    def _add_orders(self, file: GGUFWeights, info: TensorInfo, name: str) -> None:
        if (match := _PERMUTED.fullmatch(info.name)) and self._architecture in PERMUTED:
            file.orders[name] = self._of_heads(info, int(match[1]), match[2])
        kind = name.rpartition(f".{STATE}.")[2]
        if kind in self._orders:
            (file.columns if kind == OUTPUT else file.orders)[name] = self._orders[kind]
        if kind == RATES:
            file.rates.add(name)

    def _of_heads(self, info: TensorInfo, layer: int, part: str) -> Order:
        """The order in a head, whose rows must be pairs."""
        count = self._number(layer, "attention.head_count")
        if part == "k":
            count = self._number(layer, "attention.head_count_kv") or count
        if count < 1 or info.shape[0] % (2 * count):
            raise CheckpointError(
                f"{self._part.path}: {info.name} {list(info.shape)} has no pairs of rows for each of {count} heads "
                f"({self._architecture}.attention.head_count); download it again"
            )
        return Order(info.shape[0] // count // 2, 2)

    def _headers(self, info: TensorInfo) -> Iterator[tuple[str, TensorHeader]]:
        """The hub's names of a tensor; unknown names are kept, and the header check refuses them."""
        whole, match = self._header(info), _BLOCK.fullmatch(info.name)
        if match is None:
            yield _WHOLE.get(info.name, info.name), whole
            return
        prefix, part = f"model.layers.{match[1]}", match[2]
        if part in _EXPERTS and len(info.shape) == 3:
            names = [self._experts[i] for i in _EXPERTS[part]]
            experts = (f"{expert}.{name}" for expert in range(info.shape[0]) for name in names)
            each = TensorHeader(whole.dtype, (prod(info.shape[:2]), info.shape[2]), whole.start, whole.stop)
            for name, header in _parts(each, [(name, info.shape[1] // len(names)) for name in experts]):
                yield f"{prefix}.{self._block}.experts.{name}.weight", header
        elif self._architecture == "gpt-oss" and part in _GPT_OSS:
            yield f"{prefix}.{_GPT_OSS[part]}", whole
        elif part == _ROUTER:
            yield f"{prefix}.{self._block}.{self._router}.weight", whole
        elif part in JOINED.get(self._architecture, ()) and len(info.shape) == 2:
            for name, header in _parts(whole, self._joined_rows(info, int(match[1]))):
                yield f"{prefix}.{name}.weight", header
        elif part in HALVES:
            for name in HALVES[part]:
                yield f"{prefix}.{name}", whole._replace(shape=(info.shape[0] // 2, *info.shape[1:]))
        else:
            yield self._one(info, prefix, part, whole)

    def _one(self, info: TensorInfo, prefix: str, part: str, whole: TensorHeader) -> tuple[str, TensorHeader]:
        module, _, kind = part.rpartition(".")
        if part not in self._without_end and module not in self._modules:
            return info.name, whole
        name = self._without_end.get(part) or f"{self._modules[module]}.{kind}"
        if name in SHAPES:
            rows = prod(info.shape) // (info.shape[-1] if LAST in SHAPES[name] else 1)
            sizes = {LAST: info.shape[-1], REST: rows}
            whole = whole._replace(shape=tuple(sizes.get(size, size) for size in SHAPES[name]))
        if whole.dtype in BLOCK_TYPES and len(whole.shape) != 2:
            raise CheckpointError(f"{self._part.path}: {info.name} is no matrix, and has the type {whole.dtype}")
        return f"{prefix}.{name}", whole

    def _joined_rows(self, info: TensorInfo, layer: int) -> list[tuple[str, int]]:
        """The rows of each matrix in a joined one."""
        rows = info.shape[0]
        if not info.name.endswith(_QKV):
            return [("mlp.gate_proj", rows // 2), ("mlp.up_proj", rows - rows // 2)]
        heads, groups = (self._number(layer, f"attention.head_count{end}") for end in ("", "_kv"))
        width = rows // max(1, heads + 2 * groups)
        counts = {"q": heads * width, "k": groups * width, "v": groups * width}
        if sum(counts.values()) != rows:
            raise CheckpointError(
                f"{self._part.path}: {info.name} {list(info.shape)} has no rows of {heads} and twice {groups} heads "
                f"({self._architecture}.attention.head_count and head_count_kv); download it again"
            )
        return [(f"self_attn.{part}_proj", count) for part, count in counts.items()]

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


def _parts(whole: TensorHeader, counts: list[tuple[str, int]]) -> Iterator[tuple[str, TensorHeader]]:
    """Matrices whose rows are one after the other in a tensor, with the number of rows of each."""
    size, start = whole.num_bytes // whole.shape[0], whole.start
    for name, rows in counts:
        yield name, TensorHeader(whole.dtype, (rows, whole.shape[1]), start, start + rows * size)
        start += rows * size


def _differ(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """True if [H, C, nope] and [H, v, C], or [E, N] and [E, N], do not belong together."""
    return first[:2] != (second[0], second[-1])
