"""Convolutions between two gates in Triton, under the interpreter, against torch and in float64."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from moe_engine.kernels.delta.protocol import StateRuns
from moe_engine.kernels.ops.short_conv import gated_conv
from tests.kernels.convolutions import NUM_ROWS, convolved, decodes, drafts, prompts

triton_conv = pytest.importorskip("moe_engine.kernels.ops.triton_short_conv", reason="needs triton")
forms = pytest.mark.parametrize("form", [prompts, drafts, decodes], ids=lambda form: form.__name__)


@forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.each_value
def test_gated_conv(form: Callable[[], StateRuns], taps: int, dtype: torch.dtype) -> None:
    runs, width = form(), random.choice((48, 90, 300))
    projected = torch.randn(runs.num_tokens, 3 * width + 4).to(dtype)[:, : 3 * width]
    kept, weights = torch.randn(NUM_ROWS, taps - 1, width).to(dtype), torch.randn(taps, width)
    one, other = kept.clone(), kept.clone()
    got = triton_conv.gated_conv(projected, weights, one, runs)
    want = gated_conv(projected, weights, other, runs)
    assert torch.equal(one, other) and not torch.equal(one, kept)
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)
    exact, states = convolved(projected, weights, kept, runs)
    torch.testing.assert_close(got.double(), exact, rtol=2 * bound, atol=2 * bound)
    torch.testing.assert_close(one.double(), states, rtol=bound, atol=bound)


def test_no_tokens() -> None:
    """Of an idle attention group."""
    none = torch.zeros(0, dtype=torch.int64)
    runs = StateRuns([], torch.zeros(1, dtype=torch.int32), none, [], none)
    for kernel in (gated_conv, triton_conv.gated_conv):
        assert kernel(torch.zeros(0, 24), torch.ones(3, 8), torch.zeros(2, 2, 8), runs).shape == (0, 8)
