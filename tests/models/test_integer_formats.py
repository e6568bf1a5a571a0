"""Checkpoints of INT4 and INT8 weights: logits equal those of the values that the formats define."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moe_engine.config.args import EngineArgs
from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.formats.schemes import SchemeFormat
from moe_engine.models.formats.table import FORMATS, parse_format
from moe_engine.models.header_check import check_headers
from tests.models.checkpoints import make_checkpoint
from tests.models.format_checks import check_slices, ledger_fits, loaded, logits_of, step_logits, write_pair
from tests.models.fp8 import is_quantized
from tests.models.quantized import quantize, section

LAYOUTS: dict[str, dict[str, Any]] = {
    "compressed int4": {"layout": "pack-quantized"},
    "compressed int4, zeros": {"layout": "pack-quantized", "symmetric": False, "group": 16},
    "compressed int4, act-order": {"layout": "pack-quantized", "shuffled": True},
    "compressed int8": {"layout": "pack-quantized", "bits": 8, "group": 0},
    "int-quantized": {"layout": "int-quantized", "bits": 8, "group": 0},
    "int-quantized, zeros": {"layout": "int-quantized", "bits": 8, "group": 0, "symmetric": False},
    "w8a8_int8": {"layout": "w8a8_int8", "bits": 8, "group": 0},
    "awq": {"layout": "awq", "symmetric": False},
    "gptq": {"layout": "gptq"},
    "gptq, zeros": {"layout": "gptq", "symmetric": False, "group": 0},
    "gptq, act-order": {"layout": "gptq", "shuffled": True, "symmetric": False},
    "gptq_v2, int8": {"layout": "gptq", "bits": 8, "v2": True},
}
EIGHTHS = {"kv_lora_rank": 32, "v_head_dim": 16}
"""Widths that divide by eight: AWQ and GPTQ pack eight values in an int32."""


def write_both(
    folder: Path, kind: str, options: dict[str, Any], chosen: Any = is_quantized, **sizes: int
) -> tuple[Path, Path]:
    """A quantized checkpoint, and one with its values."""
    overrides = (EIGHTHS if kind.startswith("deepseek") else {}) | sizes
    path = make_checkpoint(kind, folder / "quantized", seed=4, tokenizer=False, **overrides)
    stored, plain = quantize(load_file(path / "model.safetensors"), seed=3, chosen=chosen, **options)
    dtype = "float16" if options["layout"] in ("awq", "gptq") else "bfloat16"
    return write_pair(path, stored, plain, {"torch_dtype": dtype, "quantization_config": section(**options)})


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_moe", "llama", "mixtral"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_the_dequantized_weights(tmp_path: Path, layout: str, kind: str) -> None:
    path, plain = write_both(tmp_path, kind, LAYOUTS[layout])
    check_headers(path, read_checkpoint(path), load_model_config(path))
    torch.testing.assert_close(logits_of(path), logits_of(plain), rtol=1e-5, atol=1e-5)


def test_kimi_k2_has_int4_experts_and_plain_other_weights(tmp_path: Path) -> None:
    options = LAYOUTS["compressed int4"] | {
        "ignore": ("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*")
    }
    path, plain = write_both(tmp_path, "deepseek_v3", options, lambda name: ".mlp.experts." in name)
    format = load_model_config(path).weight_format
    assert format.scheme_of("model.layers.1.mlp.experts.*.up_proj") is not None  # type: ignore[attr-defined]
    for plain_name in ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.shared_experts.up_proj", "lm_head"):
        assert format.scheme_of(plain_name) is None  # type: ignore[attr-defined]
    assert torch.equal(logits_of(path), logits_of(plain))


KEPT = [name for name in LAYOUTS if "act-order" not in name]
WIDE = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "q_lora_rank": 32, "v_head_dim": 16}


@pytest.mark.parametrize("layout", KEPT)
def test_kernels_multiply_the_codes_and_the_ledger_counts_them(tmp_path: Path, layout: str) -> None:
    """The C++ rows store codes: whole-decoder calls, experts and slices; also random weights. The scales may have
    another dtype than the model."""
    path, plain = write_both(tmp_path, "deepseek_v3", LAYOUTS[layout], **WIDE)
    config = json.loads((path / "config.json").read_text())
    dtype = random.choice(("float16", "bfloat16", "float32"))
    (path / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}))
    want = logits_of(plain, "cpu")
    torch.testing.assert_close(logits_of(path, "cpu"), want, rtol=2e-4, atol=2e-4 * float(want.abs().max()))
    stepper = loaded(path, "cpu")
    layer: Any = stepper.model.layers[1]  # type: ignore[attr-defined]
    moe = layer.feed_forward
    assert moe.weights.data.form is not None and layer.attention.fused is not None and moe.fused is not None
    assert ledger_fits(stepper) < 0.75
    logits = logits_of(path, "cpu", load_format="dummy")
    assert logits.isfinite().all() and 0.1 < logits.std() < 10


@pytest.mark.parametrize("layout", ["compressed int4, zeros", "awq", "gptq_v2, int8"])
def test_the_ledger_counts_matrices_that_are_plain_in_the_files_alone(tmp_path: Path, layout: str) -> None:
    """Their names are not in the config."""

    def chosen(name: str) -> bool:
        return is_quantized(name) and ".self_attn." not in name and (".experts." not in name or ".layers.1." in name)

    path, plain = write_both(tmp_path, "qwen3_moe", LAYOUTS[layout], chosen, **WIDE)
    stepper, want = loaded(path, "cpu"), logits_of(plain, "cpu")
    assert 0.5 < ledger_fits(stepper) < 0.95
    torch.testing.assert_close(step_logits(stepper), want, rtol=2e-4, atol=2e-4 * float(want.abs().max()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_are_those_of_the_whole_matrix(tmp_path: Path, layout: str) -> None:
    options = LAYOUTS[layout]
    stored, plain = quantize({"x_proj.weight": torch.randn(48, 128)}, **options)
    check_slices(tmp_path, stored, plain["x_proj.weight"], section(**options), rtol=0, atol=0)


def test_the_header_check_names_what_is_missing(tmp_path: Path) -> None:
    path, _ = write_both(tmp_path, "llama", LAYOUTS["gptq"])
    config, files = load_model_config(path), read_checkpoint(path)
    name = "model.layers.1.mlp.up_proj.scales"
    with pytest.raises(CheckpointError, match=rf"1 tensors .*{name} \[2, 96\] is missing"):
        check_headers(path, {key: file for key, file in files.items() if key != name}, config)


@pytest.mark.parametrize(
    "config,words",
    [
        ({"quant_method": "gptq", "bits": 3, "group_size": 32}, "quantization_config.bits is 3; served are 4 and 8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "version 'gemv' is not supported"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"}, "'marlin' is not"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups must be an object"),
        (section("pack-quantized") | {"format": "marlin-24"}, "'marlin-24' with int weights is not supported"),
        (section("pack-quantized", bits=2), "num_bits is 2; served are 4 and 8"),
        (section("pack-quantized", ignore=("re:(",)), "is no regular expression"),
        ({"quant_method": "hqq"}, "'hqq' is not supported; use a checkpoint in bf16"),
    ],
)
def test_other_settings_are_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_format(Fields({"quantization_config": config}, "config.json"))
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    "order,shuffled",
    [("group", True), ("dynamic", True), ("GROUP", True), (True, True)]
    + [("weight", False), ("static", False), (False, False), (None, False)],
)
def test_every_name_of_act_order_is_read(order: str | bool | None, shuffled: bool) -> None:
    """Source: compressed-tensors, ActivationOrdering. Files of ``dynamic`` were refused after a read of all weights."""
    config = section("pack-quantized")
    weights = next(iter(config["config_groups"].values()))["weights"]
    weights["actorder"] = order
    found = parse_format(Fields({"quantization_config": config}, "config.json"))
    assert isinstance(found, SchemeFormat)
    assert [getattr(scheme, "act_order", None) for _, scheme in found.rules] == [shuffled]
    weights["actorder"] = "columns"
    with pytest.raises(ConfigError, match=r"weights\.actorder 'columns' is not supported; served are group"):
        parse_format(Fields({"quantization_config": config}, "config.json"))


@pytest.mark.parametrize("layout,symmetric", [("gptq", True), ("gptq", False), ("awq", False)])
def test_autoround(tmp_path: Path, layout: str, symmetric: bool) -> None:
    """Its settings describe weights in the layouts of GPTQ and AWQ; some modules have their own, or are plain."""
    wide, plain_part = "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.up_proj"
    bits = {wide: 8} if layout == "gptq" else {}

    def made(width: int) -> dict[str, Any]:
        return {"layout": layout, "symmetric": symmetric, "bits": width}

    def chosen(name: str) -> bool:
        return is_quantized(name) and not name.startswith((plain_part, *bits))

    def spelled(name: str) -> str:
        """A regular expression, searched in the names, is possible too."""
        return random.choice((name, re.escape(name), rf"layers\.{name.split('.')[2]}\..*{name.rpartition('.')[2]}"))

    path = make_checkpoint("llama", tmp_path / "quantized", seed=4, tokenizer=False)
    tensors = load_file(path / "model.safetensors")
    stored, values = quantize(tensors, chosen=chosen, **made(4))
    for name, width in bits.items():
        more, known = quantize(tensors, chosen=f"{name}.weight".__eq__, **made(width))
        stored = {k: t for k, t in stored.items() if not k.startswith(name)}
        stored |= {k: t for k, t in more.items() if k.startswith(name)}
        values[f"{name}.weight"] = known[f"{name}.weight"]
    section = {
        "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": symmetric, "data_type": "int",
        "packing_format": f"auto_round:auto_{layout}", "block_name_to_quantize": "model.layers",
        "extra_config": {
            spelled(name): {"bits": width, "data_type": "float" if width == 16 else "int"}
            for name, width in ({plain_part: 16} | bits).items()
        },
    }  # fmt: skip
    path, plain = write_pair(path, stored, values, {"torch_dtype": "float16", "quantization_config": section})
    check_headers(path, read_checkpoint(path), load_model_config(path))
    torch.testing.assert_close(logits_of(path), logits_of(plain), rtol=1e-5, atol=1e-5)


def test_the_formats_of_checkpoints_are_values_of_the_flag() -> None:
    """A launch of SGLang may name the format that config.json declares."""
    for method in FORMATS:
        assert EngineArgs.from_cli(["--quantization", method]).model.quantization is not None, method


@pytest.mark.parametrize(
    "field", [{"packing_format": "auto_round:llm_compressor"}, {"data_type": "mx_fp"}, {"bits": 2}]
)
def test_autoround_refuses_other_settings(field: dict[str, Any]) -> None:
    section = {"quant_method": "auto-round", "bits": 4, "group_size": 32, **field}
    with pytest.raises(ConfigError, match=next(iter(field))):
        parse_format(Fields({"quantization_config": section}, "config.json"))
