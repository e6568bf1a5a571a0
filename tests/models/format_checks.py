"""Quantized checkpoints beside plain ones with the values that the formats define, and their logits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_engine.kernels import tables
from moe_engine.kernels.weight_forms import Multiplied
from moe_engine.models import sizes
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.footprint import held_bytes
from moe_engine.models.formats.table import parse_format
from moe_engine.models.header_check import with_stored_format
from moe_engine.models.loader import LoadOptions, load_model
from moe_engine.models.weights import WeightReader
from tests.models.checkpoints import write_tensors
from tests.models.stepper import Chunk, Stepper, make_backends


def loaded(path: Path, row: str = "torch", **options: Any) -> Stepper:
    config = with_stored_format(load_model_config(path), read_checkpoint(path))
    backends = make_backends(config, row)
    return Stepper(load_model(path, config, LoadOptions("float32", **options), backends), config, backends)


def logits_of(path: Path, row: str = "torch", **options: Any) -> Tensor:
    return step_logits(loaded(path, row, **options))


def step_logits(model: Stepper) -> Tensor:
    """Of a prompt and of three tokens that do not depend on the model."""
    found = model.step([Chunk(0, [3, 141, 59, 26, 5], False)])
    for token in (9, 7, 11):
        found += model.step([Chunk(0, [token], True)])
    return torch.cat(found)


def write_pair(
    path: Path, stored: Mapping[str, Tensor], plain: Mapping[str, Tensor], fields: dict[str, Any]
) -> tuple[Path, Path]:
    """The checkpoint `path` with the tensors `stored` and further `fields` of config.json; a copy with `plain`."""
    config = json.loads((path / "config.json").read_text())
    write_tensors(path, stored)
    (path / "config.json").write_text(json.dumps(config | fields))
    other = path.with_name("plain")
    other.mkdir()
    write_tensors(other, plain)
    (other / "config.json").write_text(json.dumps(config))
    return path, other


def check_slices(
    folder: Path, stored: Mapping[str, Tensor], whole: Tensor, section: dict[str, Any], **error: float
) -> None:
    """Slices of the matrix ``x_proj`` [48, 128] have its values; `error`: allowed rtol and atol."""
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    format = parse_format(Fields({"quantization_config": section}, "config.json"))
    reader = WeightReader(folder, torch.float32, format=format)
    some = (None, slice(32, 96)), (slice(3, 21), slice(20, 51)), (None, slice(64, 72))
    for cut in (Cut(slice(12, 36)), *(Cut(rows, cols) for rows, cols in some)):
        torch.testing.assert_close(reader.linear("x_proj", (48, 128), cut), cut.of(whole), **error)
    reader.finish()


def multiplied(name: str) -> Multiplied:
    """Forms that the rows of this name multiply as stored."""
    rows = {family: tables.FAMILIES[family] for family in ("linear", "experts")}
    return {family: next(row.multiplies for row in found if row.name == name) for family, found in rows.items()}


def ledger_fits(stepper: Stepper) -> float:
    """Checks the ledger's bytes of the loaded weights; returns them relative to float32."""
    coded = stepper.config.weight_format.held_by(multiplied("cpu"))
    counted = sizes.weight_bytes(stepper.config, 4, format=coded)
    held = held_bytes(stepper.model)
    assert abs(held - counted) <= 0.02 * counted, (held, counted)
    return counted / sizes.weight_bytes(stepper.config, 4)
