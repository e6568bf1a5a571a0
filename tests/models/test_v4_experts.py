"""Experts of DeepSeek V4: layers of both kinds with transformers' results, and the table of experts by token id."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.models.batch import RoutedTokens
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_parsers.compressed import parse_deepseek_v4
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.expert_format import experts_format
from moe_engine.models.formats.online import online_format
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.header_check import check_headers
from moe_engine.models.layers.feed_forward.moe import MoE
from moe_engine.models.tensors.model import Kind, model_tensors
from moe_engine.models.weights import WeightReader
from moe_engine.parallel.context import ParallelContext
from tests.models.format_checks import multiplied
from tests.models.stepper import make_backends
from tests.models.v4_checkpoints import FIELDS, load_v4, make_v4
from tests.models.v4_quantized import quantized_copy

HASH_LAYER, ROUTED_LAYER = FIELDS["num_hash_layers"] - 1, FIELDS["num_hash_layers"]
ROWS = pytest.mark.parametrize("row", ["torch", "cpu"])
LAYERS = pytest.mark.parametrize("layer", [HASH_LAYER, ROUTED_LAYER], ids=["by token id", "by router"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_v4(tmp_path_factory.mktemp("v4"), random.randrange(1 << 30))


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Iterator[Any]:
    with torch.inference_mode():
        yield load_v4(checkpoint)


def config_of(path: Path) -> ModelConfig:
    return parse_deepseek_v4(Fields(json.loads((path / "config.json").read_text()), str(path)), {})


def moe_layer(path: Path, layer: int, row: str) -> MoE:
    config = config_of(path)
    return MoE(config, layer, make_backends(config, row), WeightReader(path, torch.float32), ParallelContext())


def tokens_and_states(count: int) -> tuple[RoutedTokens, Tensor]:
    """Hidden states large enough for the clamp to change most of them."""
    return RoutedTokens(torch.randint(FIELDS["vocab_size"], (count,))), 3 * torch.randn(count, FIELDS["hidden_size"])


@ROWS
@LAYERS
@pytest.mark.parametrize("count", [1, 40])
def test_layers_of_both_kinds(checkpoint: Path, oracle: Any, row: str, layer: int, count: int) -> None:
    moe = moe_layer(checkpoint, layer, row)
    tokens, x = tokens_and_states(count)
    with torch.inference_mode():
        want = oracle.model.layers[layer].mlp(x[None], input_ids=tokens.ids[None])[0]
    assert (moe.fused is not None) == (row == "cpu" and layer == ROUTED_LAYER)
    torch.testing.assert_close(moe.forward(x, tokens=tokens), want, rtol=1e-4, atol=1e-4)


def test_the_clamp_is_part_of_every_row(checkpoint: Path) -> None:
    """Rows without a clamped activation are refused, by name."""
    from moe_engine.kernels.backends import plan_kernels
    from moe_engine.kernels.device import Device
    from moe_engine.models.needs import need_of_model

    need = need_of_model(config_of(checkpoint), "bfloat16")
    assert need.clamped
    with pytest.raises(ValueError, match="no clamped activation"):
        plan_kernels(Device("cuda", "H100", (9, 0)), need, {"experts": "flashinfer_trtllm"})


def test_a_table_with_absent_experts_is_refused(tmp_path: Path) -> None:
    path = make_v4(tmp_path, 0)
    tensors = load_file(path / "model.safetensors")
    tensors[f"layers.{HASH_LAYER}.ffn.gate.tid2eid"][5, 1] = FIELDS["n_routed_experts"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="tid2eid names experts 0 to 8, the layer has 0 to 7"):
        moe_layer(path, HASH_LAYER, "torch")


@pytest.fixture(scope="module", params=["fp4", "fp8"])
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in the published form and its values; matrices larger than a block."""
    source = make_v4(
        tmp_path_factory.mktemp("plain"), random.randrange(1 << 30), hidden_size=160, moe_intermediate_size=192
    )
    return quantized_copy(source, tmp_path_factory.mktemp("quantized"), request.param)


def test_every_quantized_matrix_has_the_values_of_its_definition(quantized: tuple[Path, Path]) -> None:
    stored, values = quantized
    config = config_of(stored)
    files = read_checkpoint(stored, num_layers=config.num_layers)
    check_headers(stored, files, config)
    reader = WeightReader(stored, torch.float32, format=config.weight_format)
    plain = WeightReader(values, torch.float32)
    for spec in model_tensors(config):
        for name in spec.names():
            if spec.kind is Kind.LINEAR and ".layers." in name:
                assert len(spec.shape) == 2
                matrix = name.removesuffix(".weight"), spec.shape
                assert torch.equal(reader.linear(*matrix), plain.linear(*matrix)), name
            else:
                reader.skip(name)
    reader.finish()


@ROWS
@LAYERS
def test_experts_as_published(quantized: tuple[Path, Path], row: str, layer: int) -> None:
    """The kernels' products of the stored numbers are those of the values."""
    stored, values = quantized
    config = config_of(stored)
    reader = WeightReader(stored, torch.float32, format=config.weight_format)
    moe = MoE(config, layer, make_backends(config, row), reader, ParallelContext())
    kept = experts_format(config) is not None and row == "cpu"
    assert (moe.weights.data.form is not None if row == "cpu" else False) == kept
    tokens = RoutedTokens(torch.randint(FIELDS["vocab_size"], (30,)))
    x = 0.1 * torch.randn(30, config.hidden_size)
    want = moe_layer(values, layer, row).forward(x, tokens=tokens)
    torch.testing.assert_close(moe.forward(x, tokens=tokens), want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


def test_memory_of_published_experts(quantized: tuple[Path, Path]) -> None:
    """A number of an expert is half a byte and its share of the scale; other matrices are blocks on a GPU."""
    config = config_of(quantized[0])
    expert, attention = "model.layers.2.mlp.experts.*.up_proj", "model.layers.2.self_attn.q_a_proj"
    on_cpu, on_gpu = (config.weight_format.held_by(multiplied(row)) for row in ("cpu", "triton"))
    shape, block = (192, 160), 1 + Fraction(4, 128 * 128)
    if experts_format(config) is None:
        assert on_cpu == PLAIN and on_gpu.bytes_per_element(expert, shape, 2) == block
    else:
        assert on_cpu.bytes_per_element(expert, shape, 2) == Fraction(1, 2) + Fraction(2, 32)
        assert on_cpu.bytes_per_element(attention, shape, 2) == 2
        assert on_gpu.bytes_per_element(expert, shape, 2) == Fraction(1, 2) + Fraction(1, 32)
    assert on_gpu.bytes_per_element(attention, shape, 2) == block
    assert on_gpu.bytes_per_element("model.layers.2.self_attn.compressor.kv_proj", shape, 2) == 2


def test_compressors_stay_unquantized() -> None:
    found = online_format("int4")
    assert found is not None
    for name, is_quantized in (
        ("compressor.kv_proj", False),
        ("indexer.compressor.gate_proj", False),
        ("q_proj", True),
    ):
        assert (found.scheme_of(f"model.layers.3.self_attn.{name}") is not None) == is_quantized


def test_an_unknown_dtype_of_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expert_dtype 'int3' is not supported"):
        config_of(make_v4(tmp_path, 0, expert_dtype="int3"))
