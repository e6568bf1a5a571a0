"""Writes a quantized copy of a checkpoint: FP8 blocks as DeepSeek's, compressed-tensors' packed integers, or gpt-oss's
experts in MXFP4.

File by file, each under a temporary name until it is whole, so that a call that was interrupted continues with the
files that are missing. Memory: the tensors of one file. Router, norms, embedding, head, vision tower, MTP's eh_proj,
DeepSeek V4's compressors and, with integers, projections by head and an indexer's wk are unchanged. Names are those of
the source's files.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.gguf_container import find_gguf
from moe_engine.models.checkpoint.safetensors_file import SafetensorsFile
from moe_engine.models.checkpoint.safetensors_header import read_header
from moe_engine.models.checkpoint.tensor_header import TensorHeader, WeightFile
from moe_engine.models.checkpoint_files import INDEX_FILE, TORCH_INDEX_FILE, read_checkpoint
from moe_engine.models.checkpoint_names.mistral_native import native_file
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.config_sections.compressed import CompressedConfig
from moe_engine.models.formats.fused_experts import FusedExpertsFormat
from moe_engine.models.formats.table import format_in_headers
from moe_engine.models.header_check import check_headers
from moe_engine.models.quantized_copy.section import quantization_config
from moe_engine.models.quantized_copy.target import Target, select
from moe_engine.models.quantized_copy.tensors import Conversion
from moe_engine.models.registry import is_built_in
from moe_engine.models.tensors.model import QWEN3_5_MOE

SETTINGS = "quantize.json"
_SKIPPED = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Weight files of the source, which are not copied."""
_UNFINISHED = ".tmp*"
"""Files that safetensors was writing when a call was killed."""
_WRITTEN = (INDEX_FILE, TORCH_INDEX_FILE, "config.json", SETTINGS)


def quantize_checkpoint(source: Path, output: Path, target: Target, advance: Callable[[int], None]) -> tuple[str, ...]:
    """Writes `output`, with everything else that `source` has.

    Args:
        advance: called with the bytes of the source that were processed.

    Returns:
        The projections that stay as they are because the format does not take them, as `Selection.left_out`.

    Raises:
        ConfigError: unsupported source or settings. CheckpointError: unreadable files; `output` has another checkpoint.
    """
    config = load_model_config(source)
    _check_source(source, config, target)
    files = read_checkpoint(source)
    if not files:
        raise CheckpointError(f"{source}: holds no *.safetensors file; give a folder with a whole checkpoint")
    check_headers(source, files, config)
    selection = select(source, config, target)
    stored = format_in_headers(config.weight_format, files)
    experts = stored if isinstance(stored, FusedExpertsFormat) else None
    published = isinstance(config.weight_format, FusedExpertsFormat)
    common = published and (target.format == "mxfp4" or config.architecture not in QWEN3_5_MOE)
    common = common and target.format in ("mxfp4", "fp8")
    conversion = Conversion(target, selection.quantized, experts, common)
    _prepare(source, output, target)
    weight_map: dict[str, str] = {}
    headers: dict[str, TensorHeader] = {}
    for file in {f.path: f for f in files.values()}.values():
        written = output / file.path.with_suffix(".safetensors").name
        if not written.is_file():
            part = written.with_suffix(".part")
            _save(part, _converted(file, conversion, advance))
            part.rename(written)
        else:
            advance(sum(header.num_bytes for header in file.tensors.values()))
        found = SafetensorsFile(WeightFile(written, read_header(written))).entries
        headers |= found
        weight_map |= dict.fromkeys(found, written.name)
    total = sum(header.num_bytes for header in headers.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (output / INDEX_FILE).write_text(json.dumps(index, indent=1))
    raw = json.loads((source / "config.json").read_text())
    raw["quantization_config"] = quantization_config(target, headers)
    if target.format == "fp8" and isinstance(config.attention, CompressedConfig):
        raw["expert_dtype"] = "fp8"  # without it readers take DeepSeek V4's experts for MXFP4
    (output / "config.json").write_text(json.dumps(raw, indent=2))
    (output / SETTINGS).unlink()
    return selection.left_out


def _check_source(source: Path, config: ModelConfig, target: Target) -> None:
    if find_gguf(source) is not None:
        raise ConfigError(f"{source}: is a GGUF file; quantize the model's safetensors instead")
    if native_file(source) is not None:
        raise ConfigError(f"{source}: has no config.json; quantize the model in transformers' files")
    format = config.weight_format
    if format.name:
        raise ConfigError(f"{source}: is quantized already ({format.name}); use an unquantized checkpoint")
    if not is_built_in(config.architecture):
        raise ConfigError(f"{source}: the projections of {config.architecture} are not known")
    is_gpt_oss = isinstance(format, FusedExpertsFormat) and format.alternating
    if is_gpt_oss and target.format != "mxfp4":
        raise ConfigError(f"{source}: use --format mxfp4: other engines read the experts of gpt-oss in no other form")
    if target.format == "mxfp4" and not is_gpt_oss:
        raise ConfigError(f"{source}: --format mxfp4 is for gpt-oss; use fp8, int8 or int4")
    if isinstance(format, FusedExpertsFormat) and not format.joined and target.format != "fp8":
        raise ConfigError(
            f"{source}: experts in tensors of gate and up apart are quantized to fp8 only; use --format fp8"
        )


def _prepare(source: Path, output: Path, target: Target) -> None:
    """Creates the folder with the source's other files, or reuses that of an interrupted call with the same
    settings."""
    settings = {"source": str(source.resolve()), "format": target.format, "group": target.group}
    marker = output / SETTINGS
    if output.exists() and any(output.iterdir()):
        if not marker.is_file() or json.loads(marker.read_text()) != settings:
            reason = "is not empty, and no interrupted call with these settings left it; name another folder"
            raise ConfigError(f"--output {output}: {reason}")
        for unfinished in output.glob(_UNFINISHED):
            unfinished.unlink()
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


def _converted(file: WeightFile, conversion: Conversion, advance: Callable[[int], None]) -> dict[str, Tensor]:
    opened, out = SafetensorsFile(file), dict[str, Tensor]()
    for names in _stored_together(file):
        parts = [opened.read(name) for name in names]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        out.update(conversion.tensors(names[0], file.stored_name(names[0]), whole))
        advance(sum(file.tensors[name].num_bytes for name in names))
    return out


def _stored_together(file: WeightFile) -> Iterator[list[str]]:
    """The tensors of the file; the parts of one whose rows are joined (`joined_rows`) together, in the file's order."""
    found: list[str] = []
    for name, header in file.tensors.items():
        if found:
            last = file.tensors[found[-1]]
            if file.stored_name(found[-1]) != file.stored_name(name) or last.stop != header.start:
                yield found
                found = []
        found.append(name)
    if found:
        yield found
