"""One safetensors file: reads of tensors and slices into memory.

Files are not memory-mapped: a file that becomes shorter while it is read is an error with its name, not a signal.
"""

from __future__ import annotations

import os
import weakref
from functools import partial
from math import prod

import torch
from torch import Tensor

from moe_engine.errors import CheckpointError
from moe_engine.models.checkpoint.cut import UNCUT, Cut
from moe_engine.models.checkpoint.host_copy import copy_into
from moe_engine.models.checkpoint.read_parts import SERIAL, PartReads
from moe_engine.models.checkpoint.tensor_header import WeightFile, unreadable

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_HOST = torch.device("cpu")
PART_BYTES = 1 << 22
"""Largest buffer of a read that converts or moves to a device."""
DIRECT_BYTES = 1 << 20
"""Parts of a read into place, by one of several threads."""
_GAP_BYTES = 1 << 13
"""Rows of a column slice with more unused bytes between them are read one by one."""


class SafetensorsFile:
    """An open file. Several threads may read concurrently.

    Args:
        reads: threads that read the parts of large tensors.

    Raises:
        CheckpointError: the file cannot be read.
    """

    def __init__(self, file: WeightFile, reads: PartReads = SERIAL) -> None:
        self.path, self.reads = file.path, reads
        self.entries = file.tensors
        try:
            self._fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(self.path, error) from None
        weakref.finalize(self, os.close, self._fd)

    def read(self, name: str, cut: Cut = UNCUT) -> Tensor:
        """A slice of a tensor, newly allocated on the host.

        Raises:
            CheckpointError: the file cannot be read, or has become too short.
        """
        entry = self.entries[name]
        out = torch.empty(cut.shape(entry.shape), dtype=DTYPES[entry.dtype])
        self.read_into(name, cut, out)
        return out

    def read_into(self, name: str, cut: Cut, out: Tensor) -> None:
        """out = the slice, converted to its dtype and device; directly if both are those of the file. Raises: as
        `read`."""
        entry = self.entries[name]
        if not out.numel():
            return
        if not out.dim():
            copy_into(out, self._rows(name, cut, 0, out.shape))
            return
        first = 0 if cut.rows is None else cut.rows.indices(entry.shape[0])[0]
        row_bytes = max(1, prod(out.shape[1:]) * DTYPES[entry.dtype].itemsize)
        direct = out.device == _HOST and out.dtype == DTYPES[entry.dtype] and out.is_contiguous()
        if direct and out.nbytes <= DIRECT_BYTES:
            self._read_rows(name, cut, first, out)
            return
        step = max(1, (DIRECT_BYTES if direct else PART_BYTES) // row_bytes)
        parts = [(first + start, out[start : start + step]) for start in range(0, out.shape[0], step)]
        if direct:
            self.reads.all([partial(self._read_rows, name, cut, row, to) for row, to in parts])
            return
        found = self.reads.in_order([partial(self._rows, name, cut, row, to.shape) for row, to in parts])
        for (_, to), part in zip(parts, found, strict=True):
            copy_into(to, part)

    def mapped(self, name: str) -> Tensor:
        """The bytes [rows, bytes of a row] uint8 of a tensor, mapped: for tables of which few rows are used.

        Raises:
            CheckpointError: the file has become too short.
        """
        entry = self.entries[name]
        size = os.fstat(self._fd).st_size
        if size < entry.start + entry.num_bytes:
            raise CheckpointError(f"{self.path}: has become too short for {name}; download it again")
        found = torch.from_file(str(self.path), shared=False, size=size, dtype=torch.uint8)
        return found[entry.start : entry.start + entry.num_bytes].view(entry.shape[0], -1)

    def _rows(self, name: str, cut: Cut, first: int, shape: torch.Size) -> Tensor:
        part = torch.empty(shape, dtype=DTYPES[self.entries[name].dtype])
        self._read_rows(name, cut, first, part)
        return part

    def _read_rows(self, name: str, cut: Cut, first: int, out: Tensor) -> None:
        """Rows from `first` on, cut to columns, into a contiguous host tensor of the file's dtype."""
        entry = self.entries[name]
        row_bytes = entry.num_bytes // max(1, entry.shape[0]) if entry.shape else entry.num_bytes
        pitch = entry.pitch or row_bytes
        start = entry.start + first * pitch
        flat = out.view(-1).view(torch.uint8).numpy()
        if cut.cols is None and pitch == row_bytes:
            self._read(name, flat.data, start)
            return
        width = out.shape[1] * out.element_size()
        start += 0 if cut.cols is None else cut.cols.indices(entry.shape[1])[0] * out.element_size()
        if pitch - width >= _GAP_BYTES:
            for row in range(out.shape[0]):
                self._read(name, flat[row * width : (row + 1) * width].data, start + row * pitch)
            return
        step = max(1, PART_BYTES // pitch)
        for row in range(0, out.shape[0], step):
            some = flat[row * width : (row + step) * width].reshape(-1, width)
            whole = torch.empty(len(some) * pitch, dtype=torch.uint8).numpy()
            self._read(name, whole[: len(whole) - pitch + width].data, start + row * pitch)
            some[:] = whole.reshape(-1, pitch)[:, :width]

    def _read(self, name: str, buffer: memoryview, offset: int) -> None:
        """Fills `buffer` from `offset` on."""
        while buffer:
            try:
                count = os.preadv(self._fd, [buffer], offset)
            except OSError as error:
                raise unreadable(self.path, error) from None
            if not count:
                raise CheckpointError(
                    f"{self.path}: truncated while it was read: tensor {name} ends at byte {self.entries[name].stop}, "
                    f"the file has {os.fstat(self._fd).st_size}; download it again"
                )
            buffer, offset = buffer[count:], offset + count
