"""All layers in one call: the bits of the layers' forward, for supported steps; and the declined steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.decoder.layers import MAX_TOKENS
from moe_engine.models.layers.feed_forward.moe import MoE
from moe_engine.models.layers.stack import stacked
from tests.models.checkpoints import make_checkpoint
from tests.models.stepper import Chunk, Stepper, load


class _Choices:
    """A fake recorder: keeps the choices of each layer."""

    counting, counts_dispatched = True, False

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        self.found: list[tuple[int, list[list[int]]]] = []

    def ids_buffer(self, num_tokens: int) -> Tensor:
        return torch.full((num_tokens, self.top_k), -7, dtype=torch.int32)

    def count_place(self, layer: int) -> None:
        """Needs the notification."""

    def on_select(self, layer: int, ids: Tensor) -> None:
        self.found.append((layer, ids.tolist()))


def _load(path: Path, dtype: str, stack: bool, **options: Any) -> Stepper:
    stepper = load(path, "cpu", dtype, **options)
    model: Any = stepper.model
    if model.stack is None:
        pytest.skip("no kernel here runs whole layers (no C++ compiler)")
    if not stack:
        model.stack = None
    return stepper


def _steps(stepper: Stepper, seed: int) -> list[Tensor]:
    """Two prompts, then decodes, drafts to verify, and a step with both forms."""
    generator = torch.Generator().manual_seed(seed)

    def some(count: int) -> list[int]:
        return torch.randint(10, 200, (count,), generator=generator).tolist()

    found = stepper.step([Chunk(0, some(9), False), Chunk(1, some(14), False)])
    for lengths in [(1, 1), (3, 1), (1, 4)]:
        found += stepper.step([Chunk(i, some(length), True) for i, length in enumerate(lengths)])
    found += stepper.step([Chunk(1, some(2), True), Chunk(2, some(30), False)])
    return found + stepper.step([Chunk(i, some(1), True) for i in range(3)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2", "deepseek_v2_lite"])
def test_same_bits(family: str, dtype: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path / "model", seed=3)
    results = []
    for stack in (True, False):
        stepper = _load(path, dtype, stack)
        model: Any = stepper.model
        moes = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, MoE)]
        assert moes and len(moes) < len(model.layers), "the checkpoint has layers of both kinds"
        logits = _steps(stepper, 5)
        choices = _Choices(stepper.config.moe.top_k)  # type: ignore[union-attr]
        model.record(choices)
        logits += stepper.step([Chunk(i, [20 + i, 30], True) for i in range(2)])
        assert [layer for layer, _ in choices.found] == [moe.layer_index for moe in moes]
        results.append((logits, choices.found, [cache.nan_to_num(7.0) for cache in stepper.kv]))
    for one, other in zip(results[0][0] + results[0][2], results[1][0] + results[1][2], strict=True):
        assert torch.equal(one, other)
    assert results[0][1] == results[1][1]


def test_takes_few_absorbed_tokens_only(tmp_path: Path) -> None:
    stepper = _load(make_checkpoint("deepseek_v3", tmp_path / "model", seed=1), "float32", True)
    model: Any = stepper.model
    most = MAX_TOKENS

    def taken(*chunks: Chunk) -> bool:
        before = list(stepper.lengths)
        batch = stepper.batch(list(chunks))
        stepper.lengths = before
        return bool(model.stack.takes(*model.step_args(batch)))

    stepper.step([Chunk(0, [20] * 5, False)])
    assert taken(Chunk(0, [21], True))
    assert not taken(Chunk(0, [21], True), Chunk(1, [20] * 40, False))
    few = [Chunk(0, [21] * min(most, 200), True)]
    assert taken(*few) == (most <= 200 or len(few[0].tokens) <= most)


def test_declines_layers_of_others(tmp_path: Path) -> None:
    stepper = _load(make_checkpoint("deepseek_v3", tmp_path / "model", seed=1), "float32", True)
    layer: Any = stepper.model.layers[1]  # type: ignore[attr-defined]
    assert stacked(layer) is not None
    layer.feed_forward.fused = None
    assert stacked(layer) is None
    rows = load(make_checkpoint("deepseek_v3", tmp_path / "torch", seed=1), "torch", "float32")
    assert rows.model.stack is None  # type: ignore[attr-defined]
