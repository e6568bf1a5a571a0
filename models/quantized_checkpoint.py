"""Writes a checkpoint with quantized projections: FP8 blocks as DeepSeek's, or compressed-tensors' packed integers.

File by file, each under a temporary name until it is whole, so that a call that was interrupted continues with the
files that are missing. Memory: the tensors of one file. Router, norms, embedding, head, vision tower, MTP's eh_proj
and, with integers, kv_b_proj are unchanged. Names are those of the source's files.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.gguf_container import find_gguf
from moe_engine.kernels.quantization.codes import CodedWeight, GroupCodes
from moe_engine.kernels.quantization.quantize import quantize_codes
from moe_engine.kernels.quantization.reference import quantize_weight
from moe_engine.models.checkpoint_files import INDEX_FILE, TORCH_INDEX_FILE, read_checkpoint
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.formats.fused_experts import FusedExpertsFormat
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.header_check import check_headers
from moe_engine.models.registry import is_built_in
from moe_engine.models.safetensors_file import SafetensorsFile
from moe_engine.models.safetensors_header import read_header
from moe_engine.models.tensor_header import WeightFile
from moe_engine.models.tensors import Kind, model_tensors

SETTINGS = "quantize.json"
_KEPT = (".eh_proj.weight",)
_SKIPPED = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Weight files of the source, which are not copied."""
_WRITTEN = (INDEX_FILE, TORCH_INDEX_FILE, "config.json", SETTINGS)
_TOWERS = ("visual", "vision_tower", "mm_projector", "multi_modal_projector")
"""Modules of images, in checkpoints and in transformers, whose names inside them are not always the same."""
_WEIGHT = ".weight"


@dataclass(frozen=True)
class Target:
    """
    Attributes:
        format: `fp8`, `int8` or `int4`.
        group: columns with a common scale; int4 only.
    """

    format: str
    group: int = 128

    @property
    def codes(self) -> GroupCodes | None:
        """None: FP8 blocks."""
        if self.format == "fp8":
            return None
        return GroupCodes(8, 0, scales="bfloat16") if self.format == "int8" else GroupCodes(4, self.group)

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a projection of the decoder layers is quantized."""
        if self.codes is None:
            return True
        return ".kv_b_proj." not in name and self.codes.takes(shape[1])


def quantize_checkpoint(source: Path, output: Path, target: Target, advance: Callable[[int], None]) -> None:
    """Writes `output`, with everything else that `source` has.

    Args:
        advance: called with the bytes of the source that were processed.

    Raises:
        ConfigError: unsupported source or settings. CheckpointError: unreadable files; `output` has another checkpoint.
    """
    config = load_model_config(source)
    if find_gguf(source) is not None:
        raise ConfigError(f"{source}: is a GGUF file; quantize the model's safetensors instead")
    if config.weight_format.name:
        raise ConfigError(
            f"{source}: is quantized already ({config.weight_format.name}); use an unquantized checkpoint"
        )
    if not is_built_in(config.architecture):
        raise ConfigError(f"{source}: the projections of {config.architecture} are not known")
    files = read_checkpoint(source)
    if not files:
        raise CheckpointError(f"{source}: holds no *.safetensors file")
    check_headers(source, files, config)
    _check_experts(source, config, set(files))
    names = projections(config, target, set(files))
    if not names:
        raise ConfigError(
            f"{source}: no projection has whole groups of {target.group} columns; use a smaller --group-size"
        )
    left_out = _plain_matrices(files, names)
    _prepare(source, output, target)
    weight_map: dict[str, str] = {}
    total = 0
    for file in {f.path: f for f in files.values()}.values():
        written = output / file.path.with_suffix(".safetensors").name
        if not written.is_file():
            part = written.with_suffix(".part")
            _save(part, _converted(file, names, target, advance))
            part.rename(written)
        else:
            advance(sum(header.num_bytes for header in file.tensors.values()))
        for name, header in SafetensorsFile(WeightFile(written, read_header(written))).entries.items():
            weight_map[name] = written.name
            total += header.num_bytes
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (output / INDEX_FILE).write_text(json.dumps(index, indent=1))
    raw = json.loads((source / "config.json").read_text())
    quantized = {files[name].stored_name(name) for name in names}
    raw["quantization_config"] = quantization_config(target, left_out, quantized)
    (output / "config.json").write_text(json.dumps(raw, indent=2))
    (output / SETTINGS).unlink()


def projections(config: ModelConfig, target: Target, names: set[str]) -> set[str]:
    """Names of the tensors that are quantized."""
    return {
        name
        for spec in model_tensors(config, include_mtp=config.num_nextn_predict_layers > 0)
        if spec.kind is Kind.LINEAR and spec.name.startswith("model.layers.") and not spec.name.endswith(_KEPT)
        if target.takes(spec.name, spec.shape)
        for name in spec.names()
        if name in names
    }


def _check_experts(source: Path, config: ModelConfig, names: set[str]) -> None:
    """Raises ConfigError: the matrices of a layer's experts are in common tensors."""
    format = config.weight_format
    if format == PLAIN:
        return
    assert isinstance(format, FusedExpertsFormat)
    expert = next(spec for spec in model_tensors(config) if spec.copies > 1)
    (stored,) = format.tensors(next(expert.names()).removesuffix(_WEIGHT), expert.shape, names)
    if not stored.name.endswith(_WEIGHT):
        raise ConfigError(
            f"{source}: the experts of a layer are in common tensors ({stored.name}), which this command does not "
            "quantize; use a published quantized checkpoint of the model"
        )


def _plain_matrices(files: Mapping[str, WeightFile], quantized: set[str]) -> list[str]:
    """Stored names of the modules with a matrix that is not quantized; without the embedding."""
    found = {
        file.stored_name(name)
        for file in {id(file): file for file in files.values()}.values()
        for name, header in file.tensors.items()
        if name not in quantized and name.endswith(_WEIGHT) and len(header.shape) == 2
        if not name.endswith(".embed_tokens.weight")
    }
    return sorted(name.removesuffix(_WEIGHT) for name in found)


def quantization_config(target: Target, left_out: list[str], quantized: set[str]) -> dict[str, Any]:
    """The section of config.json. By stored names: modules that are plain, and tensors that are quantized."""
    towers = [tower for tower in _TOWERS if any(_inside(name, (tower,)) for name in left_out)]
    if target.codes is None:
        named = [prefix + tower for tower in towers for prefix in ("", "model.")]
        return {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": list(dict.fromkeys(["lm_head", *named, *left_out])),
        }  # fmt: skip
    weights = {
        "num_bits": target.codes.bits, "type": "int", "symmetric": True, "dynamic": False, "actorder": None,
        "strategy": "group" if target.codes.group else "channel", "group_size": target.codes.group or None,
        "block_structure": None, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head", *_patterns(towers, left_out, quantized)],
        "kv_cache_scheme": None,
    }  # fmt: skip


def _patterns(towers: list[str], left_out: list[str], quantized: set[str]) -> list[str]:
    """compressed-tensors' spelling of plain modules, whatever precedes ``layers``: one pattern for a module of all
    layers, unless it is quantized in some."""
    found = [rf"re:(.*\.)?{tower}\..*" for tower in towers]
    known = {_numberless(name.removesuffix(_WEIGHT)) for name in quantized}
    for name in left_out:
        if name.startswith("lm_head") or _inside(name, towers):
            continue
        spelled = re.escape(name[max(name.find("layers."), 0) :])
        if _numberless(name) not in known:
            spelled = re.sub(r"\.\d+\\\.", r".\\d+\\.", spelled)
        found.append(f"re:.*{spelled}$")
    return list(dict.fromkeys(found))


def _numberless(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _inside(name: str, towers: Sequence[str]) -> list[str]:
    """The towers that have the module."""
    return [tower for tower in towers if f".{tower}." in f".{name}."]


def _prepare(source: Path, output: Path, target: Target) -> None:
    """Creates the folder with the source's other files, or reuses that of an interrupted call with the same
    settings."""
    settings = {"source": str(source.resolve()), "format": target.format, "group": target.group}
    marker = output / SETTINGS
    if output.exists() and any(output.iterdir()):
        if not marker.is_file() or json.loads(marker.read_text()) != settings:
            raise ConfigError(f"--output {output}: is not empty, and no interrupted call with these settings left it")
    else:
        output.mkdir(parents=True, exist_ok=True)
        _write(marker, json.dumps(settings))
    for file in source.iterdir():  # also after an interruption: it may have come before the last copy
        if file.is_file() and file.suffix not in _SKIPPED and file.name not in _WRITTEN:
            shutil.copy2(file, output / file.name)


def _write(file: Path, text: str) -> None:
    """Writes the whole file, or none. Raises OSError."""
    part = file.with_suffix(".part")
    try:
        part.write_text(text)
        part.rename(file)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _save(part: Path, tensors: dict[str, Tensor]) -> None:
    """Writes one file, or none. Raises OSError."""
    try:
        save_file(tensors, part, metadata={"format": "pt"})
    except SafetensorError as error:  # the library's only class: the reason is in its text
        part.unlink(missing_ok=True)
        if "No space left" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        raise OSError(str(error)) from None


def _converted(file: WeightFile, names: set[str], target: Target, advance: Callable[[int], None]) -> dict[str, Tensor]:
    opened, out = SafetensorsFile(file), dict[str, Tensor]()
    for name, header in file.tensors.items():
        tensor, stored = opened.read(name), file.stored_name(name)
        out.update(_quantized(stored, tensor, target) if name in names else [(stored, tensor)])
        advance(header.num_bytes)
    return out


def _quantized(name: str, weight: Tensor, target: Target) -> Iterator[tuple[str, Tensor]]:
    codes, prefix = target.codes, name.removesuffix(".weight")
    if codes is None:
        block = quantize_weight(weight)
        yield name, block.data
        yield f"{name}_scale_inv", block.scales
        return
    n, k = weight.shape
    coded = CodedWeight.empty(codes, n, k, "cpu")
    quantize_codes(weight, coded)
    per = 32 // codes.bits
    padded = torch.nn.functional.pad(coded.codes, (0, -k % per)).view(n, -1, per).to(torch.int64)
    shifts = torch.arange(per) * codes.bits
    words = (padded << shifts).sum(-1)
    yield f"{prefix}.weight_packed", torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    yield f"{prefix}.weight_scale", coded.scales
    yield f"{prefix}.weight_shape", torch.tensor([n, k])
