"""Matrices whose rows are joined in a checkpoint: q, k and v; gate and up (Phi-3, Phi-4). Imports no torch.

Rows are consecutive bytes, so each matrix is a tensor of its own at its place in the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from moe_engine.models.tensor_header import TensorHeader, WeightFile

JOINED = ("Phi3ForCausalLM",)
"""Architectures with such files."""
_JOINED = re.compile(r"(model\.layers\.\d+\.)(self_attn\.qkv|mlp\.gate_up)_proj\.weight")
_OUTPUT = "self_attn.o_proj.weight"


def with_parts(files: dict[str, WeightFile]) -> dict[str, WeightFile]:
    """The tensors with those of each joined matrix instead of it."""
    if not any(_JOINED.fullmatch(name) for name in files):
        return files
    changed = {id(file): _with_parts(file, files) for file in files.values()}
    return {name: changed[id(file)] for file in files.values() for name in changed[id(file)].tensors}


def _with_parts(file: WeightFile, files: Mapping[str, WeightFile]) -> WeightFile:
    tensors, stored = dict[str, TensorHeader](), dict(file.stored_names)
    for name, header in file.tensors.items():
        first, rows = 0, _rows_of(name, header, files)
        if not rows:
            tensors[name] = header
        for part, count in rows.items():
            tensors[part], stored[part] = _rows(header, first, count), file.stored_name(name)
            first += count
    return WeightFile(file.path, tensors, stored)


def _rows_of(name: str, header: TensorHeader, files: Mapping[str, WeightFile]) -> dict[str, int]:
    """The rows of each matrix in a joined one, by name; empty: it is none, or its parts are not known."""
    found = _JOINED.fullmatch(name)
    if found is None or len(header.shape) != 2:
        return {}
    layer, rows = found[1], header.shape[0]
    if found[2] == "mlp.gate_up":
        return {f"{layer}mlp.{part}_proj.weight": rows // 2 for part in ("gate", "up")} if rows % 2 == 0 else {}
    output = files.get(f"{layer}{_OUTPUT}")
    query = 0 if output is None else output.tensors[f"{layer}{_OUTPUT}"].shape[-1]
    if not 0 < query < rows or (rows - query) % 2:
        return {}
    counts = {"q": query, "k": (rows - query) // 2, "v": (rows - query) // 2}
    return {f"{layer}self_attn.{part}_proj.weight": count for part, count in counts.items()}


def _rows(header: TensorHeader, first: int, count: int) -> TensorHeader:
    each = header.num_bytes // header.shape[0]
    start = header.start + first * each
    return TensorHeader(header.dtype, (count, *header.shape[1:]), start, start + count * each)
