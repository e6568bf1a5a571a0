"""Files of ``torch.save``, as headers: the position of each tensor in the file. Imports no torch.

The format since torch 1.6 is a ZIP archive of uncompressed members: ``data.pkl``, a pickle of the saved object in which
tensors stand for storages, and ``data/KEY``, the bytes of each storage. The pickle is read by a machine that has
tensors, parameters and ordered dictionaries and nothing else, so that a file cannot run code (torch's weights_only).
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from moe_engine.errors import CheckpointError
from moe_engine.models.checkpoint.regular_file import check_regular
from moe_engine.models.checkpoint.tensor_header import ELEMENT_BYTES, TensorHeader, unreadable

_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip
_DTYPES = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"}
"""Dtypes without a storage of their own: their tensors have a storage of bytes."""
_BYTES = "U8"
_LOCAL_HEADER = 30
"""Bytes of a ZIP member's local header before its name; the lengths of name and extra field are its last two fields."""
_MAX_PICKLE = 100 << 20


@dataclass(frozen=True)
class _Storage:
    dtype: str
    key: str


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the saved object."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    is_contiguous: bool


def read_object(path: Path) -> tuple[Any, dict[str, range]]:
    """The saved object, with `StoredTensor`s in it, and the bytes of each storage.

    Raises:
        CheckpointError: not such a file, damaged, or with objects other than tensors and plain values.
    """
    try:
        check_regular(path)
        with zipfile.ZipFile(path) as archive:
            names = {info.filename: info for info in archive.infolist()}
            name = next((name for name in names if name.endswith("/data.pkl") or name == "data.pkl"), None)
            if name is None:
                raise CheckpointError(f"{path}: not a file of torch.save (it has no data.pkl)")
            if names[name].file_size > _MAX_PICKLE:
                raise CheckpointError(f"{path}: data.pkl has {names[name].file_size} bytes, which no checkpoint needs")
            saved = _Unpickler(io.BytesIO(archive.read(name))).load()
            prefix = name.removesuffix("data.pkl") + "data/"
            order = name.removesuffix("data.pkl") + "byteorder"
            if order in names and archive.read(order) != b"little":
                raise CheckpointError(f"{path}: saved on a machine of the other byte order; convert it there")
            members = {key.removeprefix(prefix): info for key, info in names.items() if key.startswith(prefix)}
        return saved, _storages(path, members)
    except CheckpointError as error:
        raise error if str(path) in str(error) else CheckpointError(f"{path}: {error}") from None
    except zipfile.BadZipFile:
        raise CheckpointError(
            f"{path}: not a ZIP archive: truncated, or saved before torch 1.6; download it again, or load and save it "
            "with a newer torch"
        ) from None
    except OSError as error:
        raise unreadable(path, error) from None
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{path}: broken data.pkl ({error!r}); download it again") from None


def read_torch_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of a saved dictionary by name. Raises CheckpointError as `read_object`, and for other objects."""
    saved, storages = read_object(path)
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{path}: holds a {type(saved).__name__}, not the tensors of a model by name")
    nested = [key for key in ("state_dict", "model") if isinstance(saved.get(key), Mapping)]
    tensors = saved[nested[0]] if nested else saved
    found = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, StoredTensor)}
    size = path.stat().st_size
    return {str(name): _header(path, str(name), tensor, storages, size) for name, tensor in found.items()}


def _header(path: Path, name: str, tensor: StoredTensor, storages: Mapping[str, range], size: int) -> TensorHeader:
    if not tensor.is_contiguous:
        raise CheckpointError(f"{path}: tensor {name} was saved as a view that is not contiguous; save a copy of it")
    width, storage = ELEMENT_BYTES[tensor.storage.dtype], storages.get(tensor.storage.key)
    if storage is None:
        raise CheckpointError(f"{path}: the storage of tensor {name} is missing; download it again")
    start = storage.start + tensor.offset * width
    header = TensorHeader(tensor.storage.dtype, tensor.shape, start, start + prod(tensor.shape) * width)
    if header.stop > size:
        raise CheckpointError(
            f"{path}: truncated: tensor {name} ends at byte {header.stop}, the file has {size}; download it again"
        )
    if header.stop > storage.stop:
        raise CheckpointError(f"{path}: tensor {name} is larger than its storage; download it again")
    return header


def _storages(path: Path, members: Mapping[str, zipfile.ZipInfo]) -> dict[str, range]:
    found = {}
    with path.open("rb") as file:
        for key, info in members.items():
            if info.compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(f"{path}: compressed; unpack it and save it with torch")
            file.seek(info.header_offset)
            head = file.read(_LOCAL_HEADER)
            name, extra = struct.unpack("<HH", head[-4:])
            start = info.header_offset + _LOCAL_HEADER + name + extra
            found[key] = range(start, start + info.file_size)
    return found


class _Unpickler(pickle.Unpickler):
    """Accepts only the objects of a dictionary of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        known = _KNOWN.get((module, name))
        if known is None:
            raise CheckpointError(
                f"it needs {module}.{name}, and files are read without running code (weights_only); save its "
                "tensors as safetensors"
            )
        return known

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or dtype not in ELEMENT_BYTES:
            raise CheckpointError(f"it has a storage of {dtype!r}, which is not supported")
        return _Storage(dtype, str(key))


def _tensor(
    storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *more: object
) -> StoredTensor:
    numbers = (offset, *shape, *stride)
    if len(shape) != len(stride) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"a tensor of shape {shape!r:.100} and strides {stride!r:.100} at {offset!r:.40}")
    expected, step = [], 1
    for length in reversed(shape):
        expected.append(step)
        step *= length
    steps = zip(shape, stride, reversed(expected))
    is_contiguous = 0 in shape or all(length == 1 or own == want for length, own, want in steps)
    return StoredTensor(storage, offset, tuple(shape), is_contiguous)


def _tensor_of_bytes(
    storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], grad: bool, hooks: object,
    dtype: str, *more: object,
) -> StoredTensor:  # fmt: skip
    if dtype not in _DTYPES.values():
        raise ValueError(f"a tensor of {dtype!r:.40} in bytes")
    return _tensor(replace(storage, dtype=dtype), offset, shape, stride)


def _parameter(data: StoredTensor, *more: object) -> StoredTensor:
    return data


_KNOWN: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_bytes,
    ("torch.storage", "UntypedStorage"): _BYTES,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
}
