"""The header of a safetensors file: names, dtypes, shapes and positions of its tensors. Imports no torch.

8 bytes little-endian header length, the header (JSON: name -> dtype, shape, data_offsets), then the data.
"""

from __future__ import annotations

import json
import stat
from math import prod
from pathlib import Path
from typing import Any

from moe_engine.errors import LFS_FIX, LFS_POINTER, CheckpointError
from moe_engine.models.checkpoint.tensor_header import ELEMENT_BYTES, TensorHeader, unreadable

_MAX_HEADER = 100 << 20


def read_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one file. Raises CheckpointError for an unreadable, truncated, corrupt or foreign file."""
    text, file_size = _text(path)
    try:
        header = json.loads(text, object_pairs_hook=_once)
        header.pop("__metadata__", None)
        tensors = {name: _tensor(name, item, 8 + len(text)) for name, item in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: broken safetensors header ({error}); download it again") from None
    end, before = 8 + len(text), ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.stop > file_size:
            raise CheckpointError(
                f"{path}: truncated: tensor {name} ends at byte {tensor.stop}, the file has {file_size}; "
                "download it again"
            )
        if tensor.start < end and tensor.num_bytes:
            raise CheckpointError(f"{path}: tensors {before} and {name} overlap in the file; download it again")
        end, before = max(end, tensor.stop), name
    return tensors


def _text(path: Path) -> tuple[bytes, int]:
    """The header, and the size of the file."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: is no regular file; give a folder with the files of a checkpoint")
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if prefix == LFS_POINTER[:8]:
                raise CheckpointError(f"{path}: {LFS_FIX}")
            if len(prefix) < 8 or length > _MAX_HEADER or 8 + length > status.st_size:
                raise CheckpointError(
                    f"{path}: truncated or not a safetensors file (header of {length} bytes, file of "
                    f"{status.st_size}); download it again"
                )
            return file.read(length), status.st_size
    except OSError as error:
        raise unreadable(path, error) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r:.100} is there twice")
    return found


def _tensor(name: str, item: dict[str, Any], base: int) -> TensorHeader:
    dtype, shape, (start, stop) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
    if dtype not in ELEMENT_BYTES:
        raise ValueError(f"dtype {dtype!r:.40} of tensor {name!r:.100} is not supported")
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError(f"tensor {name!r:.100} has the shape {list(shape)!r:.100} and offsets {start!r}, {stop!r}")
    if stop - start != prod(shape) * ELEMENT_BYTES[dtype]:
        raise ValueError(
            f"tensor {name!r:.100} of shape {list(shape)} and dtype {dtype} does not fill {stop - start} bytes"
        )
    return TensorHeader(dtype, shape, base + start, base + stop)
