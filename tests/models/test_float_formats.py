"""Checkpoints in FP8, FP4 and bitsandbytes' formats: logits equal those of the values that the formats define."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from tests.models.checkpoints import make_checkpoint
from tests.models.format_checks import check_slices, ledger_fits, loaded, logits_of, step_logits, write_pair
from tests.models.quantized_floats import FLOATS, fused_fp8, quantize_floats

WIDE = {"kv_lora_rank": 32, "v_head_dim": 16, "q_lora_rank": 32}
KEPT = [name for name in FLOATS if "fp4" in name]


def write_both(folder: Path, kind: str, name: str) -> tuple[Path, Path]:
    """A quantized checkpoint, and one with its values."""
    path = make_checkpoint(kind, folder / "q", seed=4, tokenizer=False, **(WIDE if "deepseek" in kind else {}))
    stored, plain = quantize_floats(load_file(path / "model.safetensors"), name)
    return write_pair(path, stored, plain, {"quantization_config": FLOATS[name][1]})


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_moe", "llama"])
@pytest.mark.parametrize("name", FLOATS)
def test_logits_are_those_of_the_dequantized_weights(tmp_path: Path, name: str, kind: str) -> None:
    path, plain = write_both(tmp_path, kind, name)
    check_headers(path, read_checkpoint(path), load_model_config(path))
    torch.testing.assert_close(logits_of(path), logits_of(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", KEPT)
def test_kernels_multiply_fp4_codes(tmp_path: Path, name: str) -> None:
    """Exact for MXFP4 and in a float32 model; in others scales of NVFP4 are rounded to bfloat16."""
    path, plain = write_both(tmp_path, "deepseek_v3", name)
    want, config = logits_of(plain, "cpu"), json.loads((path / "config.json").read_text())
    for dtype, most in (("float32", 1e-4), ("bfloat16", 1e-4 if "mxfp4" in name else 0.05)):
        (path / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}))
        served = loaded(path, "cpu")
        assert (step_logits(served) - want).norm() / want.norm() < most, dtype
        assert ledger_fits(served) < 0.7, dtype


@pytest.mark.parametrize("name", FLOATS)
def test_slices_are_those_of_the_whole_matrix(tmp_path: Path, name: str) -> None:
    stored, plain = quantize_floats({"x_proj.weight": torch.randn(48, 128)}, name)
    check_slices(tmp_path, stored, plain["x_proj.weight"], FLOATS[name][1])


def test_settings_of_modelopt_in_a_file_of_their_own(tmp_path: Path) -> None:
    path, plain = write_both(tmp_path, "llama", "modelopt")
    fields = json.loads((path / "config.json").read_text())
    del fields["quantization_config"]
    (path / "config.json").write_text(json.dumps(fields))
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (path / "hf_quant_config.json").write_text(json.dumps(settings))
    torch.testing.assert_close(logits_of(path), logits_of(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("halves", [False, True])
def test_experts_of_mistral_small_4(tmp_path: Path, halves: bool) -> None:
    """A scale of each expert, or of its gate and up, in common tensors of a layer."""
    name = "fp8, static, published"
    path = make_checkpoint("mistral4", tmp_path / "q", seed=4, tokenizer=False)
    stored, plain = quantize_floats(load_file(path / "model.safetensors"), name)
    for key in [key for key in stored if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        parts, plain[key] = fused_fp8(stored.pop(key).float(), halves and "gate_up" in key)
        stored |= {key + end: part for end, part in parts.items()}
    path, other = write_pair(path, stored, plain, {"quantization_config": FLOATS[name][1]})
    check_headers(path, read_checkpoint(path), load_model_config(path))
    torch.testing.assert_close(logits_of(path), logits_of(other), rtol=1e-4, atol=1e-4)
