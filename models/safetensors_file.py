"""One safetensors file, memory-mapped: views of tensors, with pages released after use."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

from moe_engine.errors import CheckpointError
from moe_engine.models.checkpoint_files import WeightFile
from moe_engine.models.cut import UNCUT, Cut

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


class SafetensorsFile:
    """Views into a mapped file.

    Raises:
        CheckpointError: the file cannot be read.
    """

    def __init__(self, file: WeightFile) -> None:
        self.path = file.path
        self.entries = file.tensors
        try:
            with file.path.open("rb") as opened:
                # A private mapping: pages stay in the page cache, and torch accepts the buffer as writable.
                self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(
                f"{file.path}: cannot be read ({error.strerror}); download the checkpoint again"
            ) from None

    def view(self, name: str) -> Tensor:
        """The whole tensor as a view of the mapping: no byte is read yet. Drop it before `release`."""
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        if entry.start == entry.stop:
            return torch.empty(entry.shape, dtype=dtype)
        if entry.start % dtype.itemsize:
            raw = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.num_bytes, offset=entry.start)
            return raw.clone().view(dtype).view(entry.shape)
        count = entry.num_bytes // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.start).view(entry.shape)

    def prefetch(self, name: str, cut: Cut = UNCUT) -> None:
        """Starts readahead of the tensor, or of the requested slice.

        Column slices with whole unused pages between the rows are not prefetched, but read on access.
        """
        entry = self.entries[name]
        start, stop = entry.start, entry.stop
        if cut.rows is not None:
            first, last, _ = cut.rows.indices(entry.shape[0])
            row_bytes = entry.num_bytes // max(1, entry.shape[0])
            start, stop = entry.start + first * row_bytes, entry.start + last * row_bytes
        if cut.cols is not None:
            width = len(range(*cut.cols.indices(entry.shape[1])))
            if entry.num_bytes // max(1, entry.shape[0]) - width * DTYPES[entry.dtype].itemsize >= 2 * mmap.PAGESIZE:
                return
        self._advise(mmap.MADV_WILLNEED, start // mmap.PAGESIZE * mmap.PAGESIZE, stop)

    def release(self, name: str) -> None:
        """Releases the tensor's pages, so that they no longer count as this process's memory."""
        entry, page = self.entries[name], mmap.PAGESIZE
        self._advise(mmap.MADV_DONTNEED, -(-entry.start // page) * page, entry.stop // page * page)

    def _advise(self, advice: int, start: int, stop: int) -> None:
        if stop > start:
            with contextlib.suppress(OSError, ValueError):
                self._map.madvise(advice, start, stop - start)
