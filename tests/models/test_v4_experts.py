"""Experts of DeepSeek V4: layers of both kinds with transformers' results, and the table of experts by token id."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_engine.errors import CheckpointError
from moe_engine.models.batch import RoutedTokens
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_compressed import parse_deepseek_v4
from moe_engine.models.config_fields import Fields
from moe_engine.models.layers.moe import MoE
from moe_engine.models.weights import WeightReader
from moe_engine.parallel.context import ParallelContext
from tests.models.stepper import make_backends
from tests.models.v4_checkpoints import FIELDS, load_v4, make_v4

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
        plan_kernels(Device("cuda", "H100", (9, 0)), need, {"experts": "deep_gemm"})


def test_a_table_with_absent_experts_is_refused(tmp_path: Path) -> None:
    path = make_v4(tmp_path, 0)
    tensors = load_file(path / "model.safetensors")
    tensors[f"layers.{HASH_LAYER}.ffn.gate.tid2eid"][5, 1] = FIELDS["n_routed_experts"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="tid2eid names experts 0 to 8, the layer has 0 to 7"):
        moe_layer(path, HASH_LAYER, "torch")
