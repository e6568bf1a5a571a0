"""Headers of a checkpoint's weight files. Reads no tensor data, imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path, PurePath

from moe_engine.errors import CheckpointError
from moe_engine.gguf_container import find_gguf
from moe_engine.models import joined_rows, ling_names, llama4_names, nemotron_names
from moe_engine.models.deepseek_v4_names import has_v4_names, v4_names
from moe_engine.models.gguf.names import read_gguf
from moe_engine.models.longcat_names import has_longcat_names, longcat_names
from moe_engine.models.mistral_native import has_native_names, native_names
from moe_engine.models.safetensors_header import read_header
from moe_engine.models.step_names import has_step_names, step_names
from moe_engine.models.tensor_header import TensorHeader, WeightFile, unreadable
from moe_engine.models.torch_file import read_torch_header

INDEX_FILE = "model.safetensors.index.json"
NATIVE_INDEX_FILE = "consolidated.safetensors.index.json"
"""Of Mistral's own files."""
TORCH_INDEX_FILE = "pytorch_model.bin.index.json"
_TORCH_FILES = ("pytorch_model.bin", "pytorch_model-*.bin", "*.pt", "*.pth", "*.bin")
"""Patterns of torch.save's files; the first that matches is used. Training states beside the weights match the last one
only."""
_INNER = {
    "model.language_model.": "model.", "model.visual.": "visual.",
    "language_model.": "", "vision_tower.encoder.patch_embed.": "visual.patch_embed.",
    "vision_tower.vision_model.": "visual.", "vision_tower.": "visual.",
    "mm_projector.": "visual.mm_projector.", "model.mm_projector.": "visual.mm_projector.",
    "multi_modal_projector.": "visual.projector.", "model.multi_modal_projector.": "visual.projector.",
    "model.vision_tower.": "visual.", "patch_merge_mlp.": "visual.merge_mlp.",
    "vision_model.": "visual.",
}  # fmt: skip
"""Prefixes of models for images and text: as transformers names their parts since 4.52; Kimi K2.5's, Mistral's and
MiniMax-M3's, as published and as transformers saves them."""
_MTP = "mtp."
_MTP_PARTS = {
    "fc": "eh_proj", "fc_embedding": "e_proj", "fc_hidden": "h_proj",
    "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm", "hyper_connection_mixer": "shared_head.hyper_connection_mixer",
}  # fmt: skip
_DENSE_AS_MOE = re.compile(r"\.block_sparse_moe\.(?=(?:gate|up|down)_proj\.)")
"""The MLP of a dense layer as transformers saves Kimi Linear's."""
_MINIMAX_MTP = re.compile(r"(?:model\.)?mtp\.layers\.(\d+)\.(?:transformer_layer\.)?(.+)")
_MINIMAX_BLOCK = re.compile(r"mtp\.layers\.\d+\.transformer_layer\.")
_STREAMS = re.compile(r"\.hc_(attn|ffn)_(?=(?:fn|base|scale)$)")
"""Weights of residual streams in GLM-5.3-Flash."""
_HY3_NORM = ".final_layernorm.weight"
_ERNIE_MTP = "model.mtp_"
_ERNIE_PARTS = {"emb_norm": "enorm.", "hidden_norm": "hnorm.", "linear_proj": "eh_proj.", "block": ""}
_HEAD_NORMS = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}
"""Older names of the norms of an EAGLE-3 head's three states."""
_BODY = ("embed_tokens.", "layers.", "norm.")

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
        return read_gguf(gguf)
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
    files = joined_rows.with_parts(files)
    if has_v4_names(files):
        return _renamed(files, v4_names(files, num_layers))
    if has_step_names(files):
        files = _renamed(files, step_names(files))
    if has_native_names(files):
        return _renamed(files, native_names(files))
    if nemotron_names.has_names(files):
        first = nemotron_names.num_layers(files) if num_layers is None else num_layers
        return _renamed(files, {name: nemotron_names.inner_name(name, first) for name in files})
    if has_longcat_names(files):
        return _renamed(files, longcat_names(files, num_layers))
    return _with_mtp(_with_rates(_with_ling(_with_parts(_with_prefix(files)))), num_layers)


def read_nextn(directory: Path, layer: int) -> dict[str, WeightFile]:
    """`read_checkpoint` of an MTP layer exported on its own, where it is layer 0, under the names that it has after
    `layer` main layers. Raises as `read_checkpoint`."""
    files, first = read_checkpoint(directory), "model.layers.0."
    own = [name for name in files if name.startswith(first)]
    return _renamed(files, {name: f"model.layers.{layer}.{name.removeprefix(first)}" for name in own})


def read_head(directory: Path) -> dict[str, WeightFile]:
    """`read_checkpoint` of an EAGLE head: its first layer is ``model.layers.0``, whatever its published name, and names
    outside the layers have no prefix. Raises as `read_checkpoint`."""
    files = read_checkpoint(directory)
    return _renamed(files, {name: _head_name(name) for name in files})


def _head_name(name: str) -> str:
    name = name.removeprefix("model.")
    for old, new in _HEAD_NORMS.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    if name.startswith("midlayer."):
        return f"model.layers.0.{name.removeprefix('midlayer.')}"
    return f"model.{name}" if name.startswith("layers.") else name


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


def _with_prefix(files: dict[str, WeightFile]) -> dict[str, WeightFile]:
    """The tensors of a model that was saved without a head, under the names that they have in a model with a head. For
    a model of images and text: the language model without its prefix, the tower under ``visual.``."""
    if any(name.startswith(tuple(_INNER)) for name in files):
        return _renamed(files, {name: _outer_name(name) for name in files})
    if f"{_BODY[0]}weight" not in files:
        return files
    return _renamed(files, {name: f"model.{name}" for name in files if name.startswith(_BODY)})


def _with_rates(files: dict[str, WeightFile]) -> dict[str, WeightFile]:
    """Kimi K3 stores rates of decay for more heads than its layers have: the headers end with the last head's."""
    for name in [name for name in files if name.endswith(".self_attn.A_log")]:
        file, block = files[name], name.removesuffix("A_log")
        bias, norm = (files.get(f"{block}{part}") for part in ("dt_bias", "o_norm.weight"))
        found = file.tensors[name]
        if len(found.shape) > 1 or bias is None or norm is None:
            continue
        each, (width,) = found.num_bytes // found.shape[0], norm.tensors[f"{block}o_norm.weight"].shape
        heads = prod(bias.tensors[f"{block}dt_bias"].shape) // width
        if found.shape[0] > heads:
            file.tensors[name] = found._replace(shape=(heads,), stop=found.start + heads * each)
    return files


def _with_parts(files: dict[str, WeightFile]) -> dict[str, WeightFile]:
    """Parts of layers with names of one family, under the model's."""
    names = {name: _DENSE_AS_MOE.sub(".mlp.", _STREAMS.sub(r".hc_\1.", name)) for name in files}
    names = {name: llama4_names.inner_name(new) for name, new in names.items()}
    names = {name: new for name, new in names.items() if new != name}
    return _renamed(files, names)


def _with_ling(files: dict[str, WeightFile]) -> dict[str, WeightFile]:
    if not any(name.startswith(ling_names.EMBEDDING) for name in files):
        return files
    return _renamed(files, {name: ling_names.ling_name(name) for name in files})


def _outer_name(name: str) -> str:
    for inner, outer in _INNER.items():
        if name.startswith(inner):
            return outer + name.removeprefix(inner)
    return name


def _with_mtp(files: dict[str, WeightFile], num_layers: int | None) -> dict[str, WeightFile]:
    """MTP layers with other names (Qwen: ``mtp.``, ERNIE: ``model.mtp_``, MiniMax-M3: ``model.mtp.layers.``, the
    norm of Hy3's and Ling's), under DeepSeek's names after the last main layer."""
    first = _num_layers(files) if num_layers is None else num_layers
    if any(_MINIMAX_BLOCK.search(name) for name in files):
        return _with_minimaxes(files, first)
    if any(name.startswith(_ERNIE_MTP) for name in files):
        return _with_ernies(files, first)
    own = [name for name in files if name.startswith(_MTP)]
    if not own:
        norms = [name for name in files if name.startswith("model.layers.") and name.endswith(_HY3_NORM)]
        return _renamed(files, {name: name.replace(_HY3_NORM, ".shared_head.norm.weight") for name in norms})
    layer, names = f"model.layers.{first}", {}
    for name in own:
        part, _, rest = name.removeprefix(_MTP).partition(".")
        names[name] = f"{layer}.{_MTP_PARTS[part]}.{rest}" if part in _MTP_PARTS else name
        if part == "layers":
            names[name] = f"{layer}.{rest.removeprefix('0.')}"
    return _renamed(files, names)


def _with_minimaxes(files: dict[str, WeightFile], first: int) -> dict[str, WeightFile]:
    names = {}
    for name in files:
        if (found := _MINIMAX_MTP.fullmatch(name)) is not None:
            rest = found[2].replace("final_layernorm.", "shared_head.norm.")
            names[name] = f"model.layers.{first + int(found[1])}.{rest}"
    return _renamed(files, names)


def _num_layers(files: dict[str, WeightFile]) -> int:
    main = [name.split(".")[2] for name in files if name.startswith("model.layers.")]
    return 1 + max((int(part) for part in main if part.isdigit()), default=-1)


def _with_ernies(files: dict[str, WeightFile], first: int) -> dict[str, WeightFile]:
    """``model.mtp_PART.J.``: part of MTP layer J, whose last norm is the model's (as in FastDeploy's layers)."""
    names, layers = dict[str, str](), set[str]()
    for name in files:
        part, _, rest = name.removeprefix(_ERNIE_MTP).partition(".")
        index, _, rest = rest.partition(".")
        if name.startswith(_ERNIE_MTP) and part in _ERNIE_PARTS and index.isdigit():
            layer = f"model.layers.{first + int(index)}."
            names[name] = f"{layer}{_ERNIE_PARTS[part]}{rest}"
            layers.add(layer)
    found = _renamed(files, names)
    if (file := found.get(norm := "model.norm.weight")) is not None:
        for layer in layers:
            name = f"{layer}shared_head.norm.weight"
            file.tensors[name], file.stored_names[name] = file.tensors[norm], norm
            found[name] = file
    return found


def _renamed(files: dict[str, WeightFile], names: Mapping[str, str]) -> dict[str, WeightFile]:
    """The same tensors with new `names`, old -> new."""
    if not names:
        return files
    each = {id(file): file for file in files.values()}  # once, not for each of its tensors
    changed = {key: _with_names(file, names) for key, file in each.items()}
    return {names.get(name, name): changed[id(file)] for name, file in files.items()}


def _with_names(file: WeightFile, names: Mapping[str, str]) -> WeightFile:
    tensors = {names.get(name, name): tensor for name, tensor in file.tensors.items()}
    stored = {names.get(name, name): file.stored_name(name) for name in file.tensors}
    return WeightFile(file.path, tensors, {name: old for name, old in stored.items() if name != old})


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
