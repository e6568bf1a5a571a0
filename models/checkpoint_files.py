"""Headers of a checkpoint's weight files. Reads no tensor data, imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path, PurePath

from moe_engine.errors import CheckpointError
from moe_engine.gguf_container import find_gguf
from moe_engine.models.checkpoint.joined_rows import with_parts
from moe_engine.models.checkpoint.safetensors_header import read_header
from moe_engine.models.checkpoint.tensor_header import TensorHeader, WeightFile, unreadable
from moe_engine.models.checkpoint.torch_file import read_torch_header
from moe_engine.models.checkpoint_names.names import head_name, renamed, with_model_names
from moe_engine.models.gguf.names import read_gguf

INDEX_FILE = "model.safetensors.index.json"
NATIVE_INDEX_FILE = "consolidated.safetensors.index.json"
"""Index of Mistral's own files."""
TORCH_INDEX_FILE = "pytorch_model.bin.index.json"
_TORCH_FILES = ("pytorch_model.bin", "pytorch_model-*.bin", "*.pt", "*.pth", "*.bin")
"""Patterns of torch.save's files; the first that matches is used. Training states next to the weights match the last
one only."""

ReadHeader = Callable[[Path], dict[str, TensorHeader]]


def read_checkpoint(directory: Path, load_format: str = "auto", num_layers: int | None = None) -> dict[str, WeightFile]:
    """Tensor name -> its file; empty if the directory has no weight files.

    Args:
        directory: or a GGUF file.
        load_format: ``safetensors``, ``pt`` (files of torch.save) or ``gguf`` reads only this format; other values read
        safetensors files, else files of torch.save or GGUF.
        num_layers: main layers of the model, for folders with some of its tensors. None: all layers are there.

    Raises:
        CheckpointError: a file in the index is missing, or a file is truncated, damaged or inconsistent with the index.
    """
    gguf = find_gguf(directory)
    if gguf is not None and load_format not in ("safetensors", "pt"):
        return dict(read_gguf(gguf))
    if gguf is not None or load_format == "gguf":
        found = "is a GGUF file" if gguf is not None else "names no GGUF file"
        raise CheckpointError(
            f"--load-format {load_format}: {directory} {found}; leave the flag out, or give another path"
        )
    files: dict[str, WeightFile] = {}
    if load_format != "pt":
        listed = (directory / name for name in (INDEX_FILE, NATIVE_INDEX_FILE))
        index = next((file for file in listed if file.is_file()), directory / INDEX_FILE)
        files = _read_indexed(directory, index) if index.is_file() else _read_files(directory)
    if not files and load_format != "safetensors":
        index = directory / TORCH_INDEX_FILE
        files = _read_indexed(directory, index) if index.is_file() else _read_torch_files(directory)
    return with_model_parts(files, num_layers)


def with_model_parts(files: dict[str, WeightFile], num_layers: int | None = None) -> dict[str, WeightFile]:
    """The tensors under the model's names, those of joined matrices by their parts. `num_layers`: see
    `read_checkpoint`."""
    return with_parts(with_model_names(files, num_layers))


def read_nextn(directory: Path, layer: int) -> dict[str, WeightFile]:
    """`read_checkpoint` of an MTP layer exported on its own, where it is layer 0, under the names that it has after
    `layer` main layers. Raises as `read_checkpoint`."""
    files, first = read_checkpoint(directory), "model.layers.0."
    own = [name for name in files if name.startswith(first)]
    return renamed(files, {name: f"model.layers.{layer}.{name.removeprefix(first)}" for name in own})


def read_head(directory: Path) -> dict[str, WeightFile]:
    """`read_checkpoint` of an EAGLE head: its first layer is ``model.layers.0``, whatever its published name, and names
    outside the layers have no prefix. Raises as `read_checkpoint`."""
    files = read_checkpoint(directory)
    return renamed(files, {name: head_name(name) for name in files})


def _read_files(directory: Path) -> dict[str, WeightFile]:
    single = directory / "model.safetensors"
    return _joined([single] if single.is_file() else sorted(directory.glob("*.safetensors")), read_header)


def _read_torch_files(directory: Path) -> dict[str, WeightFile]:
    found = (sorted(directory.glob(pattern)) for pattern in _TORCH_FILES)
    return _joined(next((paths for paths in found if paths), []), read_torch_header)


def _joined(paths: list[Path], read: ReadHeader) -> dict[str, WeightFile]:
    """The tensors of all files. Raises CheckpointError: two files have a tensor of the same name."""
    files: dict[str, WeightFile] = {}
    for path in paths:
        file = WeightFile(path, read(path))
        if twice := next((name for name in file.tensors if name in files), None):
            raise CheckpointError(
                f"{path}: tensor {twice} is in {files[twice].path.name} too; leave the files of one checkpoint in the "
                f"folder, or add {INDEX_FILE} with the file of each tensor"
            )
        files |= dict.fromkeys(file.tensors, file)
    return files


def _read_indexed(directory: Path, index: Path) -> dict[str, WeightFile]:
    try:
        listed = json.loads(index.read_text())
        weight_map = listed.get("weight_map") if isinstance(listed, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError("it has no weight_map, an object of file names")
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if PurePath(name).is_absolute() or ".." in PurePath(name).parts]
    except OSError as error:
        raise unreadable(index, error) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index}: broken index ({error}); download it again") from None
    if not names or outside:
        reason = f"names {outside[0]!r:.100}, which is not in its folder" if outside else "lists no tensors"
        raise CheckpointError(f"{index}: {reason}; download it again")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{index}: {missing[0]}{more} of {len(names)} weight files missing in {directory}; download the checkpoint "
            "again, or use --load-format dummy"
        )
    read: ReadHeader = read_torch_header if index.name == TORCH_INDEX_FILE else read_header
    files = {name: WeightFile(directory / name, read(directory / name)) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in files[name].tensors:
            other = next((file for file in files if tensor in files[file].tensors), None)
            found = "no file has it" if other is None else f"{other} has it"
            raise CheckpointError(
                f"{index}: lists {tensor} in {name}, but that file does not have it ({found}); download the index and "
                "this file again"
            )
    return {tensor: files[name] for tensor, name in weight_map.items()}
