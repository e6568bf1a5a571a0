"""Convolutions between two gates in C++, against torch, and in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch

from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.delta.protocol import StateRuns
from moe_engine.kernels.ops import cpu_short_conv
from moe_engine.kernels.ops.short_conv import gated_conv
from tests.kernels.convolutions import NUM_ROWS, convolved, decodes, drafts, prompts
from tests.kernels.cpu.conftest import threads


@pytest.mark.parametrize("form", [prompts, drafts, decodes], ids=lambda form: form.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_equals_torch(library: Library, form: Callable[[], StateRuns], taps: int, dtype: torch.dtype) -> None:
    """Parts of vectors, and several tasks of a run; projections that are views."""
    runs, width = form(), random.choice((5, 90, 300))
    projected = torch.randn(runs.num_tokens, 3 * width + 4).to(dtype)[:, : 3 * width]
    kept, weights = torch.randn(NUM_ROWS, taps - 1, width).to(dtype), torch.randn(taps, width)
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    exact, states = convolved(projected, weights, kept, runs)
    with threads(2):
        for kernel in (gated_conv, partial(cpu_short_conv.gated_conv, library)):
            stored = kept.clone()
            got = kernel(projected, weights, stored, runs)
            torch.testing.assert_close(got.double(), exact, rtol=2 * bound, atol=2 * bound)
            torch.testing.assert_close(stored.double(), states, rtol=bound, atol=bound)
            assert not torch.equal(stored, kept)


def test_chunks(library: Library) -> None:
    """A prompt in chunks has the bits of a whole one."""
    projected, weights, row = torch.randn(20, 3 * 24), torch.randn(3, 24), torch.zeros(1, dtype=torch.int64)
    cut, found = random.randint(1, 19), []
    for parts in ([20], [cut, 20 - cut]):
        kept = torch.zeros(1, 2, 24)
        runs = [StateRuns.plain([count], row) for count in parts]
        rows = zip(projected.split(parts), runs)
        found.append(torch.cat([cpu_short_conv.gated_conv(library, part, weights, kept, run) for part, run in rows]))
    assert torch.equal(*found)


def test_misfits_are_refused(library: Library) -> None:
    runs = StateRuns.plain([2], torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="does not fit"):
        cpu_short_conv.gated_conv(library, torch.zeros(3, 12), torch.zeros(3, 4), torch.zeros(1, 2, 4), runs)
    with pytest.raises(ValueError, match="does not fit"):
        cpu_short_conv.gated_conv(library, torch.zeros(2, 12), torch.zeros(3, 4), torch.zeros(1, 2, 4).bfloat16(), runs)


def test_no_tokens(library: Library) -> None:
    """Of an idle attention group."""
    none = torch.zeros(0, dtype=torch.int64)
    runs = StateRuns([], torch.zeros(1, dtype=torch.int32), none, [], none)
    found = cpu_short_conv.gated_conv(library, torch.zeros(0, 24), torch.ones(3, 8), torch.zeros(2, 2, 8), runs)
    assert found.shape == (0, 8)
