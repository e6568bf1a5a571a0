"""--quantization of a plain checkpoint: weights are quantized while loading, and kernels store them quantized."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.kernels.quantization.codes import CodedWeight, GroupCodes, PlainCodes
from moe_engine.kernels.quantization.quantize import quantize_codes
from moe_engine.models import sizes
from moe_engine.models.config_file import load_model_config
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.footprint import held_bytes
from moe_engine.models.formats.online import online_format
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.formats.table import parse_format
from moe_engine.models.layers.linear import Projection, format_for
from moe_engine.models.loader import LoadOptions, load_model
from moe_engine.models.weights import WeightReader
from moe_engine.planning.model.quantization import with_quantization
from tests.models.checkpoints import make_checkpoint
from tests.models.format_checks import multiplied, step_logits
from tests.models.quantized_floats import FLOATS
from tests.models.stepper import Stepper, make_backends


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wide = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "q_lora_rank": 64}
    return make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("plain"), seed=5, v_head_dim=16, **wide)


def loaded(path: Path, name: str, row: str = "cpu") -> Stepper:
    config = load_model_config(path)
    if name:
        config = dataclasses.replace(config, weight_format=online_format(name))
    backends = make_backends(config, row)
    return Stepper(load_model(path, config, LoadOptions("float32"), backends), config, backends)


@pytest.mark.parametrize("name", ["int4", "int4wo-64", "int8", "fp8"])
def test_kernels_keep_what_others_dequantize(plain: Path, name: str) -> None:
    """The same values in every row; near the unquantized model; bytes as the ledger counts them."""
    model = loaded(plain, name)
    found, want = step_logits(model), step_logits(loaded(plain, name, "torch"))
    torch.testing.assert_close(found, want, rtol=2e-4, atol=2e-4 * float(want.abs().max()))
    exact = step_logits(loaded(plain, ""))
    error = float((found - exact).norm() / exact.norm())
    assert 0 < error < (0.2 if name == "int8" else 1.0)
    counted = sizes.weight_bytes(model.config, 4, format=model.config.weight_format.held_by(multiplied("cpu")))
    held = held_bytes(model.model)
    assert abs(held - counted) <= 0.02 * counted, (held, counted)


@pytest.mark.parametrize("form", [GroupCodes(4, 32), GroupCodes(8, 0, scales="float32"), GroupCodes(8, 16)], ids=str)
def test_quantized_values_are_nearest(form: GroupCodes) -> None:
    """An error of half a step at most, and never more than with the scale of the largest magnitude."""
    weight = torch.randn(40, 64)
    coded = form.empty(40, 64, "cpu")
    assert isinstance(coded, CodedWeight)
    quantize_codes(weight, coded)
    groups = weight.view(40, -1, form.group_of(64))
    most = groups.abs().amax(-1, keepdim=True)
    steps = (most / (form.middle - 1)).to(coded.scales.dtype).float()
    simple = (groups / steps).round().clamp(-form.middle, form.middle - 1) * steps
    error = (coded.dequantized().view_as(groups) - groups).square().sum()
    assert error <= (simple - groups).square().sum() * 1.0001
    if form.bits == 8:
        assert ((coded.dequantized().view_as(groups) - groups).abs() <= 0.51 * steps).all()


@pytest.mark.parametrize(
    "flags,words",
    [
        ({"quantization": "awq"}, ["--quantization awq", "not quantized", "use int4"]),
        ({"quantization": "int8", "torchao_config": "int8wo"}, ["--quantization int8", "--torchao-config int8wo"]),
    ],
)
def test_names_of_checkpoint_formats_are_refused(plain: Path, flags: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        with_quantization(load_model_config(plain), EngineArgs.from_kwargs(**flags))
    assert all(word in str(refusal.value) for word in words)


def test_a_quantized_checkpoint_keeps_its_format(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, fp8=True, tokenizer=False)
    config = load_model_config(path)
    assert with_quantization(config, EngineArgs.from_kwargs(quantization="fp8")) is config
    with pytest.raises(ConfigError, match=r"--quantization int4: .* declares fp8"):
        with_quantization(config, EngineArgs.from_kwargs(quantization="int4"))


@pytest.mark.parametrize("method,asked", [("awq", "moe_wna16"), ("gptq", "moe_wna16"), ("gptq", "gptq_marlin")])
def test_names_of_kernels_serve_the_checkpoints_that_they_multiply(plain: Path, method: str, asked: str) -> None:
    section = {"quant_method": method, "bits": 4, "group_size": 32}
    config = load_model_config(plain)
    config = dataclasses.replace(config, weight_format=parse_format(Fields({"quantization_config": section}, "")))
    assert with_quantization(config, EngineArgs.from_kwargs(quantization=asked)) is config
    with pytest.raises(ConfigError, match=rf"--quantization mxfp4: .* declares {method}"):
        with_quantization(config, EngineArgs.from_kwargs(quantization="mxfp4"))


@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_other_matrices_keep_their_values(plain: Path, name: str) -> None:
    """The head and kv_b, which layers quantize in layouts of their own or not at all."""
    format = online_format(name)
    assert format is not None
    reader, exact = (WeightReader(plain, torch.float32, format=own) for own in (format, PLAIN))
    for prefix in ("lm_head", "model.layers.0.self_attn.kv_b_proj", "model.layers.0.mlp.down_proj"):
        (stored,) = exact.format.tensors(prefix, (), exact.names)
        shape = exact._files[stored.name].entries[stored.name].shape
        same = torch.equal(reader.linear(prefix, shape), exact.linear(prefix, shape))  # type: ignore[arg-type]
        assert same == ("mlp" not in prefix)


def test_kernels_that_quantize_no_weights_get_codes(plain: Path) -> None:
    """As the rows of a GPU that multiply codes."""
    name, shape = "model.layers.0.mlp.down_proj", (128, 128)
    format = online_format("int4")
    assert format is not None
    reader = WeightReader(plain, torch.float32, format=format)
    parts = [Projection(name, shape)]
    own = format_for({GroupCodes: None, PlainCodes: None}, reader, parts)
    codes = format_for({GroupCodes: None}, reader, parts)
    assert isinstance(own, PlainCodes) and type(codes) is GroupCodes and codes == own.codes
    assert format_for({}, reader, parts) is None
    found, want = reader.linear(name, shape, out=codes.empty(*shape, "cpu")), CodedWeight.empty(codes, *shape, "cpu")
    quantize_codes(WeightReader(plain, torch.float32).linear(name, shape), want)
    assert torch.equal(found.codes, want.codes) and torch.equal(found.scales, want.scales)


def test_names_of_compressed_blocks_and_of_common_experts(tmp_path: Path) -> None:
    """compressed-tensors' FP8 blocks are served as `fp8`; experts in common tensors are not quantized while loading."""
    path = make_checkpoint("llama", tmp_path / "blocks", tokenizer=False)
    fields = json.loads((path / "config.json").read_text())
    section = FLOATS["compressed fp8, blocks"][1]
    (path / "config.json").write_text(json.dumps(fields | {"quantization_config": section}))
    config = load_model_config(path)
    for asked in ("compressed-tensors", "fp8"):
        assert with_quantization(config, EngineArgs.from_kwargs(quantization=asked)) is config
    common = load_model_config(make_checkpoint("qwen3_5_moe", tmp_path / "common", tokenizer=False))
    with pytest.raises(ConfigError, match="experts of this model are in common tensors"):
        with_quantization(common, EngineArgs.from_kwargs(quantization="int8"))
