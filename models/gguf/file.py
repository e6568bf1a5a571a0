"""One GGUF file as `SafetensorsFile`: block types are converted if a read has a destination.

Legend: N rows, K columns, B blocks, S bytes of a block, H heads, C kv_lora_rank, E experts.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from moe_engine.models.checkpoint.cut import UNCUT, Cut
from moe_engine.models.checkpoint.read_parts import PartReads
from moe_engine.models.checkpoint.safetensors_file import PART_BYTES, SafetensorsFile
from moe_engine.models.checkpoint.tensor_header import BLOCK_TYPES, TensorHeader, WeightFile
from moe_engine.models.formats.gguf_blocks import values_of
from moe_engine.models.gguf.families import Order
from moe_engine.models.gguf.names import GGUFWeights

_PARTS = (".first", ".second")


class GGUFFile:
    """An open file. Several threads may read concurrently. Raises: as `SafetensorsFile`."""

    def __init__(self, file: GGUFWeights, reads: PartReads) -> None:
        self.path, self.entries = file.path, file.tensors
        self._weights, self._joined = file, file.joined
        stored = {name: _bytes(header) for name, header in file.tensors.items() if name not in file.joined}
        for name, order in file.orders.items():
            if order.stored:
                stored[name] = stored[name]._replace(shape=(order.stored, *stored[name].shape[1:]))
        self._shapes: dict[str, Any] = {}
        for name, joined in file.joined.items():
            for end, header in zip(_PARTS, (joined.first, joined.second)):
                self._shapes[name + end] = header
                *rows, columns = header.shape
                stored[name + end] = _bytes(header._replace(shape=(prod(rows), columns)))
        self._file = SafetensorsFile(WeightFile(file.path, stored), reads)

    def read(self, name: str, cut: Cut = UNCUT) -> Tensor:
        """A slice as stored, newly allocated on the host: blocks as uint8 [N, B, S], of whole blocks of columns."""
        entry, file = self.entries[name], self._weights
        if name in self._joined:
            return cut.of(self._join(name))
        if name in file.columns:
            return self._with_columns(name, cut)
        if name in file.rates:
            return (-self._with_rows(name, cut).float()).log()
        if name in file.orders and entry.shape:
            return self._with_rows(name, cut)
        return self._read(name, cut)

    def read_into(self, name: str, cut: Cut, out: Tensor) -> None:
        """out = the slice, converted to its dtype and device. Raises: as `read`."""
        entry, file = self.entries[name], self._weights
        if not out.numel():
            return
        if entry.dtype in BLOCK_TYPES and name not in self._joined:
            self._dequantize(name, cut, out)
        elif name in self._joined or name in file.columns or name in file.rates or name in file.orders:
            out.copy_(self.read(name, cut))
        else:
            self._file.read_into(name, cut, out)

    def _dequantize(self, name: str, cut: Cut, out: Tensor) -> None:
        """Dequantizes some rows at a time."""
        dtype, (rows, columns) = self.entries[name].dtype, self.entries[name].shape
        numbers, _ = BLOCK_TYPES[dtype]
        first, stop, _ = (cut.rows or slice(None)).indices(rows)
        left, right, _ = (cut.cols or slice(None)).indices(columns)
        order = self._weights.columns.get(name)
        if order is not None:  # all columns, in the file's order
            left, right = 0, columns
        whole = slice(left // numbers * numbers, -(-right // numbers) * numbers)
        within = slice(left - whole.start, right - whole.start)
        step = max(1, PART_BYTES // (4 * columns))
        parts = [slice(start, min(stop, start + step)) for start in range(first, stop, step)]
        cuts = [Cut(part, None if cut.cols is None else whole) for part in parts]
        read = self.read if order is None else self._read
        found = self._file.reads.in_order([partial(read, name, one) for one in cuts])
        for part, blocks in zip(parts, found, strict=True):
            values = values_of(dtype, blocks)
            values = values[:, within] if order is None else values[:, _places(order, cut.cols, columns)]
            out[part.start - first : part.stop - first].copy_(values)

    def _with_rows(self, name: str, cut: Cut) -> Tensor:
        """Rows in the hub's order."""
        order = self._weights.orders.get(name)
        if order is None:
            return self._read(name, cut)
        places = _places(order, cut.rows, self.entries[name].shape[0])
        low = int(places.min())
        found = self._read(name, Cut(slice(low, int(places.max()) + 1), cut.cols))
        return found.index_select(0, places - low)

    def _with_columns(self, name: str, cut: Cut) -> Tensor:
        """Columns in the hub's order; of a matrix in blocks whole blocks."""
        order, entry = self._weights.columns[name], self.entries[name]
        places, found = _places(order, cut.cols, entry.shape[1]), self._read(name, Cut(cut.rows))
        numbers = BLOCK_TYPES[entry.dtype][0] if entry.dtype in BLOCK_TYPES else 1
        return found.index_select(1, places[::numbers] // numbers)

    def _read(self, name: str, cut: Cut) -> Tensor:
        """A slice in the file's order of rows."""
        entry = self.entries[name]
        if entry.dtype not in BLOCK_TYPES:
            return self._file.read(name, cut)
        numbers, size = BLOCK_TYPES[entry.dtype]
        columns = cut.cols
        if columns is not None:
            left, right, _ = columns.indices(entry.shape[1])
            columns = slice(left // numbers * size, right // numbers * size)
        return self._file.read(name, Cut(cut.rows, columns)).unflatten(1, (-1, size))

    def _join(self, name: str) -> Tensor:
        """kv_b_proj [H * (nope + v), C] in float32, from its parts by head; biases of gate and up [E, 2 N]."""
        first, second = (self._part(name + end) for end in _PARTS)
        if self._joined[name].alternating:
            return torch.stack((first, second), -1).flatten(1)
        return torch.cat((first.transpose(1, 2), second), 1).flatten(0, 1)

    def _part(self, name: str) -> Tensor:
        header: TensorHeader = self._shapes[name]
        stored = self._file.read(name)
        if header.dtype in BLOCK_TYPES:
            stored = values_of(header.dtype, stored.unflatten(1, (-1, BLOCK_TYPES[header.dtype][1])))
        return stored.float().view(header.shape)


def _places(order: Order, cut: slice | None, size: int) -> Tensor:
    """Places in the file of the hub's rows (or columns) in a slice."""
    first, stop, _ = (cut or slice(None)).indices(size)
    places: Tensor = order.places(torch.arange(first, stop))
    return places


def _bytes(header: TensorHeader) -> TensorHeader:
    """A matrix of blocks as bytes; others unchanged."""
    if header.dtype not in BLOCK_TYPES:
        return header
    numbers, size = BLOCK_TYPES[header.dtype]
    *rows, columns = header.shape
    return header._replace(dtype="U8", shape=(*rows, columns // numbers * size))
