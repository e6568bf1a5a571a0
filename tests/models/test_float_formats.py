"""Checkpoints in FP8, FP4 and bitsandbytes' formats: logits equal those of the values that the formats define."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.errors import ConfigError
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.formats.table import parse_format
from moe_engine.models.header_check import check_headers
from tests.models.checkpoints import make_checkpoint
from tests.models.format_checks import check_slices, ledger_fits, loaded, logits_of, step_logits, write_pair
from tests.models.fp8 import is_quantized
from tests.models.quantized_floats import (
    FLOATS,
    Written,
    fused_fp8,
    matrix_fp8,
    modelopt_blocks,
    modelopt_mxfp8,
    nvfp4,
    quantize_floats,
)

WIDE = {"kv_lora_rank": 32, "v_head_dim": 16, "q_lora_rank": 32}
WIDTHS: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3_moe": {}, "deepseek_v3": WIDE, "qwen3_next": {}, "minimax_m3": {},
    "nemotron_h": {"hidden_size": 128, "moe_intermediate_size": 96, "moe_shared_expert_intermediate_size": 96},
}  # fmt: skip
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


STACKED = re.compile("(q|k|v|gate|up|q_a)_proj$|kv_a_proj_with_mqa$")
MIXED = {
    "FP8": matrix_fp8, "NVFP4": nvfp4, "W4A16_NVFP4": nvfp4, "MXFP8": modelopt_mxfp8, "FP8_PB_WO": modelopt_blocks,
}  # fmt: skip


def write_mixed(folder: Path, kind: str, outer: str = "model.") -> tuple[Path, Path]:
    """ModelOpt's MIXED_PRECISION: every matrix in a drawn format or plain, the head too; experts of a layer and
    projections of one input alike, as ModelOpt writes them."""
    path = make_checkpoint(kind, folder / "q", random.randrange(2**31), tokenizer=False, **WIDTHS.get(kind, {}))
    drawn, layers = dict[str, str](), dict[str, dict[str, Any]]()
    stored, plain = dict[str, Tensor](), dict[str, Tensor]()
    for key, tensor in load_file(path / "model.safetensors").items():
        module, experts, _ = key.removesuffix(".weight").partition(".experts.")
        module = module + ".experts" if experts else STACKED.sub("joined", module)
        kinds = ["FP8", "NVFP4", "W4A16_NVFP4", "FP8_PB_WO", *([""] if experts else ["MXFP8", ""])]
        matrix = "vision" not in key and (is_quantized(key) or bool(experts) or key == "lm_head.weight")
        name = drawn.setdefault(module, random.choice(kinds)) if matrix else ""
        name = name if tensor.shape[-1] % 16 == 0 else ""
        if not name:
            stored[key] = plain[key] = tensor
            continue
        parts, plain[key] = MIXED[name](tensor.float())
        stored |= {key.removesuffix(".weight") + end: part.clone() for end, part in parts.items()}
        listed = module if experts else key.removesuffix(".weight")
        listed = re.sub(r"^model\.(?!language_model\.)", outer, listed)
        layers[listed] = {"quant_algo": name, "group_size": 16 if "NVFP4" in name else None}
    section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    return write_pair(path, stored, plain, {"quantization_config": section})


@pytest.mark.parametrize("kind", WIDTHS)
def test_a_format_for_each_module(tmp_path: Path, kind: str) -> None:
    """As NVIDIA's Qwen3.6, Nemotron 3.5 and MiniMax-M3 are published. Codes stay codes on a CPU, and the ledger counts
    FP8 of the same kernel family as dequantized."""
    path, plain = write_mixed(tmp_path, kind, random.choice(["model.", "model.language_model."]))
    check_headers(path, read_checkpoint(path), load_model_config(path))
    want = logits_of(plain)
    torch.testing.assert_close(logits_of(path), want, rtol=1e-4, atol=1e-4)
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"torch_dtype": "float32"}))
    served = loaded(path, "cpu")
    assert (step_logits(served) - want).norm() / want.norm() < 1e-4
    ledger_fits(served)


GROUPS: dict[str, tuple[Callable[[Tensor], Written], dict[str, Any]]] = {
    name: (write, {"format": config["format"], "weights": config["config_groups"]["group_0"]["weights"]})
    for name, (write, config) in FLOATS.items()
    if config["quant_method"] == "compressed-tensors"
}


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_groups_of_several_formats(tmp_path: Path, kind: str) -> None:
    """compressed-tensors' ``mixed-precision``: experts in one form and attention in another, as RedHat publishes
    GLM-5.3-Flash; layers of the same module may differ."""
    path = make_checkpoint(kind, tmp_path / "q", random.randrange(2**31), tokenizer=False, **WIDTHS[kind])
    dense = r"re:.*layers\.(?:0|2)\.mlp\.(gate|up|down)_proj$"
    patterns = [r"re:.*self_attn\..*_proj$", r"re:.*\.mlp\.experts\..*", dense]
    chosen = dict(zip(patterns, random.sample(sorted(GROUPS), 3)))
    stored, plain = dict[str, Tensor](), dict[str, Tensor]()
    for key, tensor in load_file(path / "model.safetensors").items():
        module = key.removesuffix(".weight")
        name = next((name for target, name in chosen.items() if re.match(target[3:], module)), None)
        if name is None or not is_quantized(key):
            stored[key] = plain[key] = tensor
            continue
        parts, plain[key] = GROUPS[name][0](tensor.float())
        stored |= {module + end: part.clone() for end, part in parts.items()}
    groups = {f"group_{i}": {"targets": [target], **GROUPS[name][1]} for i, (target, name) in enumerate(chosen.items())}
    section = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    path, other = write_pair(path, stored, plain, {"quantization_config": {**section, "ignore": ["lm_head"]}})
    check_headers(path, read_checkpoint(path), load_model_config(path))
    want = logits_of(other)
    torch.testing.assert_close(logits_of(path), want, rtol=1e-4, atol=1e-4)
    if kind == "qwen3_moe":  # the other has kv_b_proj
        ledger_fits(loaded(path, "cpu"))


@pytest.mark.parametrize("place", ["input", "weight_output"])
def test_rotations_of_activations_are_refused(place: str) -> None:
    """llm-compressor's transforms; those of weights alone are in the stored weights."""
    apply = [{"targets": ["re:.*down_proj$"], "location": place}]
    transforms = {"config_groups": {"R4": {"type": "hadamard", "apply": apply}}}
    section = {**FLOATS["compressed nvfp4"][1], "transform_config": transforms}
    fields = Fields({"quantization_config": section}, "config.json")
    if place == "weight_output":
        parse_format(fields)
        return
    with pytest.raises(ConfigError, match=r"transform_config\.config_groups\.R4 rotates activations"):
        parse_format(fields)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (None, "quantized_layers must be an object"),
        ({"model.layers.0.mlp.up_proj": {"quant_algo": "W4A8"}}, r"quantized_layers\.model\.layers\.0\.mlp\.up_proj"),
        ({"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 32}}, "group_size must be 16"),
        (
            {
                f"model.layers.0.mlp.experts.{i}.up_proj": {"quant_algo": name}
                for i, name in enumerate(("FP8", "NVFP4"))
            },
            r"experts of model\.layers\.0\.mlp\.experts\.\*\.up_proj",
        ),
    ],
)
def test_modules_that_are_refused(layers: dict[str, Any] | None, message: str) -> None:
    section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    with pytest.raises(ConfigError, match=message):
        parse_format(Fields({"quantization_config": section}, "config.json"))


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


@pytest.mark.parametrize("form,size", [("nvfp4-pack-quantized", 16), ("mxfp4-pack-quantized", 32)])
def test_groups_of_another_size_are_refused_from_the_section(form: str, size: int) -> None:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": size}
    group = {"targets": ["Linear"], "weights": weights}
    section = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    parse_format(Fields({"quantization_config": section}, "config.json"))
    weights["group_size"] = 64
    with pytest.raises(ConfigError, match=rf"weights\.group_size must be {size} in {form}"):
        parse_format(Fields({"quantization_config": section}, "config.json"))
