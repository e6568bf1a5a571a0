"""Checkpoints in FP8, FP4 and bitsandbytes' formats: logits equal those of the values that the formats define."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_fields import Fields
from moe_engine.models.config_file import load_model_config
from moe_engine.models.cut import Cut
from moe_engine.models.formats.table import parse_format
from moe_engine.models.header_check import check_headers
from moe_engine.models.loader import load_model
from moe_engine.models.weights import WeightReader
from tests.models.checkpoints import make_checkpoint, write_tensors
from tests.models.quantised_floats import FLOATS, quantise_floats
from tests.models.stepper import Chunk, Stepper, make_backends

WIDE = {"kv_lora_rank": 32, "v_head_dim": 16, "q_lora_rank": 32}
KEPT = [name for name in FLOATS if "fp4" in name]


def write_both(folder: Path, kind: str, name: str) -> tuple[Path, Path]:
    """A quantised checkpoint, and one with its values."""
    path = make_checkpoint(kind, folder / "q", seed=4, tokenizer=False, **(WIDE if "deepseek" in kind else {}))
    stored, plain = quantise_floats(load_file(path / "model.safetensors"), name)
    fields = json.loads((path / "config.json").read_text())
    write_tensors(path, stored)
    (path / "config.json").write_text(json.dumps(fields | {"quantization_config": FLOATS[name][1]}))
    other = folder / "plain"
    other.mkdir()
    write_tensors(other, plain)
    (other / "config.json").write_text(json.dumps(fields))
    return path, other


def logits_of(path: Path, row: str = "torch") -> Tensor:
    config = load_model_config(path)
    backends = make_backends(config, row)
    model = Stepper(load_model(path, config, "float32", "cpu", backends), config, backends)
    found = model.step([Chunk(0, [3, 141, 59, 26, 5], False)])
    return torch.cat(found + model.step([Chunk(0, [9], True)]))


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_moe", "llama"])
@pytest.mark.parametrize("name", FLOATS)
def test_logits_are_those_of_the_dequantised_weights(tmp_path: Path, name: str, kind: str) -> None:
    path, plain = write_both(tmp_path, kind, name)
    check_headers(path, read_checkpoint(path), load_model_config(path))
    torch.testing.assert_close(logits_of(path), logits_of(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", KEPT)
def test_kernels_multiply_fp4_codes(tmp_path: Path, name: str) -> None:
    """Exact for MXFP4; scales of NVFP4 are rounded to bfloat16."""
    path, plain = write_both(tmp_path, "deepseek_v3", name)
    want = logits_of(plain, "cpu")
    error = (logits_of(path, "cpu") - want).norm() / want.norm()
    assert error < (1e-4 if "mxfp4" in name else 0.05)


@pytest.mark.parametrize("name", FLOATS)
def test_slices_are_those_of_the_whole_matrix(tmp_path: Path, name: str) -> None:
    stored, plain = quantise_floats({"x_proj.weight": torch.randn(48, 128)}, name)
    save_file(stored, tmp_path / "model.safetensors")
    format = parse_format(Fields({"quantization_config": FLOATS[name][1]}, "config.json"))
    reader = WeightReader(tmp_path, torch.float32, format=format)
    for rows, cols in ((slice(12, 36), None), (None, slice(32, 96)), (slice(3, 21), slice(20, 51))):
        cut = Cut(rows, cols)
        torch.testing.assert_close(reader.linear("x_proj", (48, 128), cut), cut.of(plain["x_proj.weight"]))
    reader.finish()


def test_settings_of_modelopt_in_a_file_of_their_own(tmp_path: Path) -> None:
    path, plain = write_both(tmp_path, "llama", "modelopt")
    fields = json.loads((path / "config.json").read_text())
    del fields["quantization_config"]
    (path / "config.json").write_text(json.dumps(fields))
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (path / "hf_quant_config.json").write_text(json.dumps(settings))
    torch.testing.assert_close(logits_of(path), logits_of(plain), rtol=1e-4, atol=1e-4)
