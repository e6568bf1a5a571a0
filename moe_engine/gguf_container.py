"""The container of GGUF files (llama.cpp): metadata, and the position of each tensor in the file. Reads no tensor data.

Little-endian: magic ``GGUF``, version (2 or 3), counts of tensors and of metadata entries; the entries; name,
dimensions (the fastest first), type and offset of each tensor; then, at the next multiple of ``general.alignment``, the
data.
Source: ggml's docs/gguf.md. Imports no torch.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from moe_engine.errors import CheckpointError

SUFFIX = ".gguf"
VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_COUNT, _MAX_TEXT, _MAX_DIMS = 1 << 28, 1 << 27, 4
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_BUFFER = 1 << 20


@dataclass(frozen=True)
class TensorInfo:
    """A tensor: `shape` in torch's order (the fastest dimension last), ggml's number of its type, and its first byte in
    the file."""

    name: str
    shape: tuple[int, ...]
    type: int
    start: int


@dataclass(frozen=True)
class Container:
    """
    Attributes:
        metadata: by key; arrays are tuples.
        size: bytes of the file.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: tuple[TensorInfo, ...]
    size: int


def find_gguf(path: str | Path) -> Path | None:
    """The GGUF file that a model path names: the file itself, or the only one of a folder without other weights (of a
    model in parts the first one). None: the path names no GGUF file.

    Raises:
        CheckpointError: a folder with several models in GGUF and no other weights.
    """
    path = Path(path)
    if path.suffix == SUFFIX:
        return path if path.is_file() else None
    if not path.is_dir():
        return None
    found = [file for file in sorted(path.glob(f"*{SUFFIX}")) if _number(file) == 1]
    if not found or any(next(path.glob(pattern), None) for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth")):
        return None
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise CheckpointError(f"{path}: has several GGUF files ({names}); give one of them as --model-path")
    return found[0]


def parts_of(path: Path) -> list[Path]:
    """The files of a model in parts (name-00001-of-00003.gguf), or the single file.

    Raises:
        CheckpointError: a part is missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    if not 0 < int(match[2]) <= count:
        raise CheckpointError(f"{path}: its name is of no part of {count}; rename it, or download it again")
    parts = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path}: {missing[0]} of {count} parts is missing; download it to the same folder")
    return parts


def _number(path: Path) -> int:
    match = _PART.fullmatch(path.name)
    return 1 if match is None else int(match[2])


def read_container(path: Path) -> Container:
    """Metadata and tensors of one file.

    Raises:
        CheckpointError: not a GGUF file, truncated, or of an unknown version.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); download it again") from None
    return _read(path, status.st_size, status.st_mtime_ns)


@lru_cache(2)  # config, headers and tokenizer of a launch read the same file
def _read(path: Path, size: int, changed: int) -> Container:
    try:
        with path.open("rb", _BUFFER) as file:
            return _Reader(path, file, size).container()
    except (struct.error, UnicodeDecodeError, MemoryError, OverflowError) as error:
        raise CheckpointError(f"{path}: truncated or damaged header ({error}); download it again") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); download it again") from None


class _Reader:
    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size = path, file, size

    def container(self) -> Container:
        if self._file.read(4) != b"GGUF":
            self._fail("no GGUF file")
        version = self._one("I")
        if version not in VERSIONS:
            big = version in (2 << 24, 3 << 24)
            self._fail("is big-endian, served are little-endian files" if big else f"has version {version}, not 2 or 3")
        num_tensors, num_entries = self._count("tensors"), self._count("metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._text()
            metadata[key] = self._value(self._one("I"), key)
        infos = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            self._fail(f"general.alignment is {alignment!r}")
        base = -(-self._file.tell() // alignment) * alignment
        tensors = tuple(TensorInfo(name, shape, kind, base + offset) for name, shape, kind, offset in infos)
        return Container(self._path, metadata, tensors, self._size)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = self._text(), self._one("I")
        if dims > _MAX_DIMS:
            self._fail(f"tensor {name!r:.100} has {dims} dimensions")
        shape = struct.unpack(f"<{dims}Q", self._bytes(8 * dims))
        kind, offset = struct.unpack("<IQ", self._bytes(12))
        return name, tuple(reversed(shape)), kind, offset

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._one(_SCALARS[kind])
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            self._fail(f"metadata {key!r:.100} has the unknown type {kind}")
        of, count = self._one("I"), self._count(f"values of {key!r:.100}")
        if of in _SCALARS:
            format = f"<{count}{_SCALARS[of]}"
            return struct.unpack(format, self._bytes(struct.calcsize(format)))
        if of != _STRING:
            self._fail(f"metadata {key!r:.100} is an array of type {of}")
        return tuple(self._text() for _ in range(count))

    def _text(self) -> str:
        length = self._one("Q")
        if length > _MAX_TEXT:
            self._fail(f"has a text of {length} bytes")
        return self._bytes(length).decode()

    def _count(self, what: str) -> int:
        count: int = self._one("Q")
        if count > min(_MAX_COUNT, self._size):
            self._fail(f"has {count} {what}")
        return count

    def _one(self, format: str) -> Any:
        return struct.unpack(f"<{format}", self._bytes(struct.calcsize(f"<{format}")))[0]

    def _bytes(self, count: int) -> bytes:
        if count > self._size:
            self._fail("truncated")
        found = self._file.read(count)
        if len(found) < count:
            self._fail("truncated")
        return found

    def _fail(self, complaint: str) -> None:
        raise CheckpointError(f"{self._path}: {complaint}; use a GGUF file of version 2 or 3, or download it again")
