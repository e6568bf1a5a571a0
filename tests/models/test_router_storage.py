"""A router's weight keeps the dtype of the checkpoint: the same logits, half the bytes; updates keep its values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_engine.errors import CheckpointError
from moe_engine.models import sizes
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.dummy_weights import DummyReader
from moe_engine.models.layers.feed_forward.moe import MoE
from moe_engine.models.loader import LoadOptions, gates_of, reload
from moe_engine.models.partial_weights import ReceivedWeights
from moe_engine.models.received_tensors import ReceivedTensors
from moe_engine.models.tensors.model import ROUTERS
from moe_engine.planning.inputs.checkpoint import sums
from tests.models import stepper
from tests.models.checkpoints import make_checkpoint
from tests.models.stepper import Chunk

GATE = "model.layers.1.mlp.gate.weight"
STEP = [Chunk(0, list(range(40, 70)), False)]


def with_wide_gates(source: Path, path: Path) -> Path:
    """A copy with the same values of routers, in float32."""
    path.mkdir()
    tensors = load_file(source / "model.safetensors")
    save_file({n: t.float() if n.endswith(ROUTERS) else t for n, t in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_bytes((source / "config.json").read_bytes())
    return path


@pytest.mark.parametrize("kind", ["deepseek_v3", "mixtral"])
def test_the_bits_of_a_float32_router_in_half_the_bytes(kind: str, tmp_path: Path) -> None:
    narrow = make_checkpoint(kind, tmp_path / "narrow", dtype="bfloat16", tokenizer=False)
    wide = with_wide_gates(narrow, tmp_path / "wide")
    found = {path: stepper.load(path, "cpu", "bfloat16") for path in (narrow, wide)}
    assert torch.equal(found[narrow].step(STEP)[0], found[wide].step(STEP)[0])
    config = found[narrow].config
    elements = sizes.num_gate_elements(config)
    assert elements > 0
    for path, gates in ((narrow, elements), (wide, 0)):
        files = read_checkpoint(path)
        assert sums(files, config.num_layers).bf16_gates == gates
        held = found[path].model.weight_bytes  # type: ignore[attr-defined]
        assert held - found[wide].model.weight_bytes == -2 * gates  # type: ignore[attr-defined]
    torch_row = stepper.load(narrow, "torch", "bfloat16")
    assert gates_of([cast(Any, torch_row.model)]) == torch.float32


def replaced(model: Any, path: Path) -> Iterator[tuple[Any, Any]]:
    return reload(model, path, load_model_config(path), LoadOptions("bfloat16"))


@pytest.mark.parametrize("served", [torch.bfloat16, torch.float32])
def test_another_checkpoint_keeps_the_served_dtype(served: torch.dtype, tmp_path: Path) -> None:
    """Weights of both storages replace those of both; values that bfloat16 does not hold are refused by name."""
    first = make_checkpoint("deepseek_v3", tmp_path / "first", 1, dtype="bfloat16", tokenizer=False)
    second = make_checkpoint("deepseek_v3", tmp_path / "second", 2, dtype="bfloat16", tokenizer=False)
    other = with_wide_gates(second, tmp_path / "other")
    if served == torch.float32:
        first, second, other = with_wide_gates(first, tmp_path / "wide"), other, second
    model = stepper.load(first, "cpu", "bfloat16").model
    values = load_file(second / "model.safetensors")[GATE].float()
    for path in (second, other):
        gates = [new._gate for _, new in replaced(model, path) if isinstance(new, MoE)]
        assert {gate.dtype for gate in gates} == {served} and torch.equal(gates[0].float(), values)
    tensors = load_file(other / "model.safetensors")
    save_file(tensors | {GATE: torch.randn(values.shape)}, other / "model.safetensors")
    if served == torch.float32:
        list(replaced(model, other))
    else:
        with pytest.raises(CheckpointError, match=f"{GATE} is served in bfloat16, which does not hold"):
            list(replaced(model, other))


def test_a_received_router_keeps_the_served_dtype() -> None:
    exact = torch.randn(4, 8).bfloat16()
    structure = DummyReader(torch.float32)
    structure.served_gates = torch.bfloat16
    for sent, fits in ((exact, True), (exact.float(), True), (torch.randn(4, 8), False)):
        received = ReceivedWeights(ReceivedTensors("a trainer", {GATE: sent}), structure)
        if not fits:
            with pytest.raises(CheckpointError, match=GATE):
                received.gate_dtype(GATE)
            continue
        gate = received.tensor(GATE, (4, 8), dtype=received.gate_dtype(GATE))
        assert gate.dtype == torch.bfloat16 and torch.equal(gate, exact)
        assert received.gate_dtype("model.layers.2.mlp.gate.weight") == torch.bfloat16, "not sent"


def test_random_weights_have_routers_as_checkpoints_store_them() -> None:
    assert DummyReader(torch.bfloat16).gate_dtype(GATE) == torch.bfloat16
    assert DummyReader(torch.float32).gate_dtype(GATE) == torch.float32
