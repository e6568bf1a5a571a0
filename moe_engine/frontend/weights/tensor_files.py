"""Passes tensors to the ranks: as safetensors files in a temporary folder, which exist during the update.

Tensors arrive as safetensors, which is data alone. Pickles (SGLang's MultiprocessingSerializer) are refused: loading
one can run any code, and the handles in them belong to the memory of the process that made them.
"""

from __future__ import annotations

import base64
import binascii
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moe_engine.errors import CheckpointError, InputError
from moe_engine.models.checkpoint.safetensors_header import read_header
from moe_engine.models.checkpoint.tensor_header import ELEMENT_BYTES
from moe_engine.processes.runtime_dir import RuntimeDir

FIELD = "serialized_named_tensors"
FILE = "model.safetensors"
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "uint8": "U8", "int8": "I8", "int32": "I32", "int64": "I64",
}  # fmt: skip
HOW = f"send {FIELD} as a list of safetensors.torch.save({{name: tensor}}) in base64"


class TensorFiles:
    """A folder for each item of a request. `with` removes them at its end.

    Attributes:
        paths: the folders.
    """

    def __init__(self) -> None:
        self._dir = RuntimeDir()
        self.paths: list[str] = []

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._dir.remove()

    def add_serialized(self, items: Sequence[str]) -> None:
        """Writes the items of a request. Takes time proportional to their size: not for an event loop.

        Raises:
            InputError: an item is no base64, a pickle, no safetensors data, or the disk is full.
        """
        for number, item in enumerate(items):
            field = f"{FIELD}[{number}]"
            try:
                data = base64.b64decode(item, validate=True)
            except (binascii.Error, ValueError):
                raise InputError.at(field, f"not base64; {HOW}") from None
            file = self._new()
            _write(file, [data])
            try:
                read_header(file)
            except CheckpointError as error:
                if data[:1] == b"\x80" or data[:2] == b"PK":
                    raise InputError.at(
                        field, f"a pickle, which is never loaded, because it can run any code; {HOW}"
                    ) from None
                reason = str(error).removeprefix(f"{file}: ").removesuffix("; download it again")
                raise InputError.at(field, f"{reason}; {HOW}") from None

    def add_tensors(self, named: Iterable[tuple[str, Any]]) -> None:
        """Writes torch tensors, of any device.

        Raises:
            InputError: a name twice, a dtype that checkpoints do not have, or the disk is full.
        """
        tensors: dict[str, Any] = {}
        for name, tensor in named:
            if name in tensors:
                raise InputError(f"named_tensors has {name} twice", field="named_tensors")
            tensors[name] = tensor.detach().cpu().contiguous()
        header: dict[str, Any] = {}
        start = 0
        for name, tensor in tensors.items():
            dtype = _DTYPES.get(str(tensor.dtype).removeprefix("torch."))
            if dtype is None:
                raise InputError.at("named_tensors", f"{name} is {tensor.dtype}, which no checkpoint has")
            stop = start + tensor.numel() * ELEMENT_BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
            start = stop
        text = json.dumps(header).encode()
        parts = [_bytes(tensor) for tensor in tensors.values()]
        _write(self._new(), [len(text).to_bytes(8, "little"), text, *parts])

    def _new(self) -> Path:
        folder = self._dir.path / str(len(self.paths))
        folder.mkdir()
        self.paths.append(str(folder))
        return folder / FILE


def _bytes(tensor: Any) -> Any:
    """The memory of a contiguous tensor on the host."""
    import torch

    return tensor.view(-1).view(torch.uint8).numpy().data


def _write(file: Path, parts: Sequence[Any]) -> None:
    needed = sum(len(part) for part in parts)
    free = shutil.disk_usage(file.parent).free
    if needed > free:
        raise InputError(f"{needed} bytes of tensors do not fit in {file.parent}: {free} are free; set TMPDIR")
    try:
        with file.open("wb") as out:
            for part in parts:
                out.write(part)
    except OSError as error:  # others have filled the disk meanwhile
        raise InputError(f"tensors cannot be written to {file.parent}: {error.strerror}; set TMPDIR") from None
