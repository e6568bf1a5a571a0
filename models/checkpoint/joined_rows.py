"""Matrices whose rows are joined in a checkpoint: q, k and v; gate and up (Phi-3, Phi-4; q, k and v alone: Ling 2.0;
gate and up alone: GLM-4, Granite's shared expert). Imports no torch.

Rows are consecutive bytes, so each matrix is a tensor of its own at its place in the file. Of quantized matrices that
holds for numbers and scales whose first dimension is the rows'; the others (one scale of a matrix, its shape) belong
to all matrices. In AWQ's and GPTQ's layouts the matrix is transposed: the parts are columns, of which several may be
one element.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from moe_engine.models.checkpoint.tensor_header import ELEMENT_BYTES, TensorHeader, WeightFile

ROWS_FIRST = ("compressed-tensors", "fp8", "fbgemm_fp8", "w8a8_fp8", "w8a8_int8", "modelopt", "mxfp8")
"""Formats (`quant_method`) whose tensors have rows first."""
COLUMNS_FIRST = ("awq", "gptq", "auto-round")
_JOINED = re.compile(r"(model\.layers\.\d+\.)(self_attn\.qkv|(?:block_sparse_moe\.shared_)?mlp\.gate_up)_proj\.(.+)")
_MATRICES = ("weight_packed", "weight")
_TRANSPOSED = ".qweight"
_OUTPUT = "self_attn.o_proj"
_ROWS_OF_ELEMENT = (1, 4, 8, 128)
"""Rows of an element of a column: of numbers and scales, of packed zero points, of scales of FP8 blocks."""


def with_parts(files: dict[str, WeightFile]) -> dict[str, WeightFile]:
    """The tensors with those of each joined matrix instead of it."""
    if not any(_JOINED.fullmatch(name) for name in files):
        return files
    changed = {id(file): _with_parts(file, files) for file in files.values()}
    return {name: changed[id(file)] for file in files.values() for name in changed[id(file)].tensors}


def _with_parts(file: WeightFile, files: Mapping[str, WeightFile]) -> WeightFile:
    tensors, stored = dict[str, TensorHeader](), dict(file.stored_names)
    for name, header in file.tensors.items():
        first, rows = 0, _rows_of(name, files)
        cut = _columns if f"{name.rpartition('.')[0]}{_TRANSPOSED}" in files else _rows
        if not rows:
            tensors[name] = header
        for part, count in rows.items():
            tensors[part], stored[part] = cut(header, first, count, sum(rows.values())), file.stored_name(name)
            first += count
    return WeightFile(file.path, tensors, stored)


def _rows_of(name: str, files: Mapping[str, WeightFile]) -> dict[str, int]:
    """The rows of each matrix in a joined one, by the name of its tensor; empty: the tensor is none of a joined one, or
    its parts are not known."""
    found = _JOINED.fullmatch(name)
    joined = None if found is None else _matrix(f"{found[1]}{found[2]}_proj", files)
    if found is None or joined is None:
        return {}
    (layer, block, end), rows = found.groups(), joined[0]
    if block.endswith("mlp.gate_up"):
        mlp = layer + block.removesuffix("gate_up")
        return {f"{mlp}{part}_proj.{end}": rows // 2 for part in ("gate", "up")} if rows % 2 == 0 else {}
    output = _matrix(f"{layer}{_OUTPUT}", files)
    query = 0 if output is None else output[1] * (output[0] // joined[1])  # several numbers may be one element
    if not 0 < query < rows or (rows - query) % 2:
        return {}
    counts = {"q": query, "k": (rows - query) // 2, "v": (rows - query) // 2}
    return {f"{layer}self_attn.{part}_proj.{end}": count for part, count in counts.items()}


def _matrix(prefix: str, files: Mapping[str, WeightFile]) -> tuple[int, ...] | None:
    """Rows and elements of a row of the tensor with a matrix's numbers; of a transposed one rows and columns."""
    if f"{prefix}{_TRANSPOSED}" in files:
        return _transposed(prefix, files)
    found = [name for end in _MATRICES if (name := f"{prefix}.{end}") in files]
    shape = files[found[0]].tensors[found[0]].shape if found else ()
    return shape if len(shape) == 2 and all(shape) else None


def _transposed(prefix: str, files: Mapping[str, WeightFile]) -> tuple[int, int] | None:
    """Rows and columns of a matrix whose elements are numbers of several rows (AWQ) or columns (GPTQ)."""
    names = [f"{prefix}{end}" for end in (_TRANSPOSED, ".scales", ".qzeros")]
    shapes = [files[name].tensors[name].shape for name in names if name in files]
    if len(shapes) != len(names) or not all(len(shape) == 2 and all(shape) for shape in shapes):
        return None
    (columns, elements), (_, rows), (_, zeros) = shapes
    return rows, columns * (rows // zeros) if elements == rows else columns


def _rows(header: TensorHeader, first: int, count: int, rows: int) -> TensorHeader:
    """Rows [first, first + count) of a tensor whose first dimension is that of the `rows` in turn, or of groups of
    them; of another one all of it."""
    by_row = len(header.shape) == 2 or header.shape == (rows,)
    each = rows // header.shape[0] if by_row and header.shape[0] and rows % header.shape[0] == 0 else 0
    if each not in _ROWS_OF_ELEMENT or first % each or count % each:
        return header
    size = header.num_bytes // header.shape[0]
    start = header.start + first // each * size
    return TensorHeader(header.dtype, (count // each, *header.shape[1:]), start, start + count // each * size)


def _columns(header: TensorHeader, first: int, count: int, columns: int) -> TensorHeader:
    """Columns [first, first + count) of a tensor of that many `columns`, or of groups of them; of a vector, which has
    an element for each row, all of it."""
    if len(header.shape) != 2 or not header.shape[1] or columns % header.shape[1]:
        return header
    each, size = columns // header.shape[1], ELEMENT_BYTES[header.dtype]
    if first % each or count % each:
        return header
    pitch, width = header.shape[1] * size, count // each * size
    start = header.start + first // each * size
    stop = start + (header.shape[0] - 1) * pitch + width
    return TensorHeader(header.dtype, (header.shape[0], count // each), start, stop, pitch)
