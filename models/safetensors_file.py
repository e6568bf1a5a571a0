"""One safetensors file, memory-mapped: header, views of tensors, and pages given back after use.

Format: 8 bytes little-endian header length, the header (JSON: name -> dtype, shape, data_offsets), then the data.
"""

from __future__ import annotations

import contextlib
import json
import mmap
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_engine.errors import CheckpointError

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
_MAX_HEADER = 100 << 20


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: byte range in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


class SafetensorsFile:
    """Views into a mapped file.

    Raises:
        CheckpointError: the file is missing, is not safetensors, is truncated, or its header contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.entries = _read_header(path, file.read(8), file, path.stat().st_size)
                # A private mapping: pages are the page cache's, and torch accepts the buffer as writable.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror}); download the checkpoint again") from None

    def view(self, name: str) -> Tensor:
        """The whole tensor as a view of the mapping: no byte is read yet. Drop it before `release`."""
        entry = self.entries[name]
        if entry.start == entry.stop:
            return torch.empty(entry.shape, dtype=entry.dtype)
        size = entry.dtype.itemsize
        if entry.start % size:
            raw = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.num_bytes, offset=entry.start)
            return raw.clone().view(entry.dtype).view(entry.shape)
        count = entry.num_bytes // size
        return torch.frombuffer(self._map, dtype=entry.dtype, count=count, offset=entry.start).view(entry.shape)

    def prefetch(self, name: str) -> None:
        """Has the system start to read the tensor."""
        self._advise(name, mmap.MADV_WILLNEED, outward=True)

    def release(self, name: str) -> None:
        """Lets go of the tensor's pages, so that they no longer count as this process's memory."""
        self._advise(name, mmap.MADV_DONTNEED, outward=False)

    def _advise(self, name: str, advice: int, outward: bool) -> None:
        entry, page = self.entries[name], mmap.PAGESIZE
        if outward:
            start, stop = entry.start // page * page, entry.stop
        else:
            start, stop = -(-entry.start // page) * page, entry.stop // page * page
        if stop <= start:
            return
        with contextlib.suppress(OSError, ValueError):
            self._map.madvise(advice, start, stop - start)


def _read_header(path: Path, prefix: bytes, file: object, file_size: int) -> dict[str, Entry]:
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > _MAX_HEADER or 8 + length > file_size:
        raise CheckpointError(
            f"{path}: truncated or not a safetensors file (header of {length} bytes, file of {file_size}); "
            "download it again"
        )
    try:
        header = json.loads(file.read(length))  # type: ignore[attr-defined]
        header.pop("__metadata__", None)
        entries = {name: _entry(item, 8 + length) for name, item in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: broken safetensors header ({error}); download it again") from None
    for name, entry in entries.items():
        if entry.stop > file_size:
            raise CheckpointError(
                f"{path}: truncated: tensor {name} ends at byte {entry.stop}, the file has {file_size}; "
                "download it again"
            )
    return entries


def _entry(item: dict[str, object], base: int) -> Entry:
    dtype = DTYPES.get(str(item["dtype"]))
    if dtype is None:
        raise ValueError(f"dtype {item['dtype']} is not supported")
    shape = tuple(int(n) for n in item["shape"])  # type: ignore[attr-defined]
    start, stop = (base + int(offset) for offset in item["data_offsets"])  # type: ignore[attr-defined]
    count = 1
    for n in shape:
        count *= n
    if stop - start != count * dtype.itemsize:
        raise ValueError(f"shape {list(shape)} does not fill {stop - start} bytes")
    return Entry(dtype, shape, start, stop)
