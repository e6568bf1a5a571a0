"""The gated delta net in Triton's interpreter against its recurrence in float64."""

from __future__ import annotations

import pytest
import torch

from moe_engine.kernels.delta import triton_chunks, triton_delta
from moe_engine.kernels.delta.protocol import DeltaShape, StateRuns
from tests.kernels.drawn import delta_inputs
from tests.kernels.reference.test_delta import compare, kernel, recurrence, wide

SHAPES = (
    DeltaShape(2, 4, 8, 12, 4),
    DeltaShape(1, 1, 20, 40, 2, sigmoid=True),
    DeltaShape(2, 2, 20, 12, 4, decays=20, sigmoid=True),
    DeltaShape(1, 2, 8, 40, 2, decays=8, bound=-5.0),
    DeltaShape(2, 4, 20, 24, 4, additive=True),
    DeltaShape(1, 3, 16, 40, 2, additive=True, shortest=0.4, longest=0.9),
    DeltaShape(2, 2, 20, 24, 0, additive=True, shortest=1.0, longest=1.0),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.each_value
def test_decodes_drafts_and_prompts(shape: DeltaShape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several chunks and of one, with stored intermediate states, a decode, and drafts that all store."""
    monkeypatch.setattr(triton_delta, "SHORT", 8)
    monkeypatch.setitem(triton_chunks.CHUNKS, dtype, 16 if dtype == torch.float32 else 32)
    lens, reads = [1, 3, 50, 5, 14], [3, 0, 2, 5, 1]
    stored = [(1,), (1, 2, 3), (20, 50), (2, 5), (6, 14)]
    rows = torch.full((sum(lens),), -1, dtype=torch.int64)
    starts = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    targets = ((3,), (9, 10, 11), (12, 2), (7, 5), (8, 1))
    for begin, places, found in zip(starts.tolist(), stored, targets):
        rows[[begin + place - 1 for place in places]] = torch.tensor(found)
    runs = StateRuns(lens, starts, torch.tensor(reads), stored, rows)
    compare("triton", shape, runs, 13, dtype, 3e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(("size", "decays"), [(16, 1), (64, 1), (64, 16)])
def test_chunks_of_keys_that_are_alike(size: int, decays: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of nearly the same direction, beta near 1 and little decay: the powers of A would exceed float32."""
    shape, count = DeltaShape(1, 1, 16, 16, 2, decays), 80
    monkeypatch.setitem(triton_chunks.CHUNKS, torch.float32, size)
    inputs, weights, states = delta_inputs(shape, count, 1, torch.float32)
    inputs.mixed[..., :32] = 1 + 0.01 * torch.randn(count, 1, 32)
    inputs.b[:], inputs.a[:] = 6.0, -6.0
    weights.conv[:, :, :32].abs_()
    expected, runs = wide(states), StateRuns.plain([count], torch.tensor([0]))
    wanted = recurrence(wide(inputs), weights, expected, runs, shape)
    got = kernel("triton").run(inputs, weights, states, runs, shape)
    for found, right in ((got, wanted), (states.memory, expected.memory)):
        assert torch.linalg.vector_norm(found.double() - right) <= 1e-4 * torch.linalg.vector_norm(right)


def test_decodes() -> None:
    compare("triton", SHAPES[0], StateRuns.plain([1, 1, 1], torch.tensor([4, 0, 2])), 5, torch.float32, 1e-5)


def test_channels_that_decay_quickly() -> None:
    """A product of factors exp(G_i) and exp(-G_j) would exceed float32 within a block."""
    shape, count = DeltaShape(1, 1, 16, 16, 2, decays=16), 70
    inputs, weights, states = delta_inputs(shape, count, 1, torch.float32)
    inputs.a[:, :, ::2] = 12.0
    expected, runs = wide(states), StateRuns.plain([count], torch.tensor([0]))
    wanted = recurrence(wide(inputs), weights, expected, runs, shape)
    got = kernel("triton").run(inputs, weights, states, runs, shape)
    for found, right in ((got, wanted), (states.memory, expected.memory)):
        assert torch.linalg.vector_norm(found.double() - right) <= 3e-5 * torch.linalg.vector_norm(right)
