"""The gated delta net in Triton's interpreter against its recurrence in float64."""

from __future__ import annotations

import pytest
import torch

from moe_engine.kernels.delta import triton_delta
from moe_engine.kernels.delta.protocol import DeltaShape, StateRuns
from tests.kernels.reference.test_delta import compare

SHAPES = (DeltaShape(2, 4, 8, 12, 4), DeltaShape(1, 1, 20, 40, 2))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decodes_drafts_and_prompts(shape: DeltaShape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long and a short prompt with stored intermediate states, a decode, and drafts that all store their states."""
    monkeypatch.setattr(triton_delta, "SHORT", 8)
    long = 14
    lens, reads = [1, 3, 5, long], [3, 0, 5, 1]
    stored = [(1,), (1, 2, 3), (2, 5), (6, long)]
    rows = torch.full((sum(lens),), -1, dtype=torch.int64)
    for token, row in ((0, 3), (1, 9), (2, 10), (3, 11), (5, 7), (8, 5), (9 + 5, 8), (9 + long - 1, 1)):
        rows[token] = row
    starts = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    runs = StateRuns(lens, starts, torch.tensor(reads), stored, rows)
    compare("triton", shape, runs, 12, dtype, 3e-5 if dtype == torch.float32 else 2e-2)


def test_decodes() -> None:
    compare("triton", SHAPES[0], StateRuns.plain([1, 1, 1], torch.tensor([4, 0, 2])), 5, torch.float32, 1e-5)
