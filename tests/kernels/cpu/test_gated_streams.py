"""Residual streams with gates of low rank in C++, against torch (whose formulas tests/kernels/triton checks in
float64)."""

from __future__ import annotations

import random

import pytest
import torch

from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.ops.cpu_gated_streams import CpuGatedStreams
from moe_engine.kernels.ops.gated_streams import IN_TORCH
from tests.kernels.cpu.conftest import threads

SHAPES = [(4, 64, 5), (2, 33, 1), (3, 1100, 2), (20, 24, 3), (4, 2048, 1)]
"""Streams, channels, tokens: parts of vectors, several tasks of a token, more streams than a vector has numbers."""
every = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


@every
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch(library: Library, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """With a result that is added first, and without; weights of the next result, and none; results that are views."""
    kernels, (count, width, tokens) = CpuGatedStreams(library).kernels, shape
    bound, rank = 1e-2 if dtype == torch.bfloat16 else 1e-5, random.choice((5, 16, 320))
    residual, weight = torch.randn(tokens, count * (width + 1)).to(dtype), torch.rand(count, width) + 0.5
    x, wide = torch.randn(tokens, width + 3).to(dtype)[:, :width], count * width
    with threads(2):
        for given, rows in ((x, residual), (None, residual), (None, residual[:, :wide].contiguous())):
            expected, found = rows.clone(), rows.clone()
            want, got = (of.norm(given, r, weight, 1e-5) for of, r in ((IN_TORCH, expected), (kernels, found)))
            exact = {"rtol": 0.0, "atol": 0.0} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
            torch.testing.assert_close(found, expected, **exact)  # float32: a sum of a product in one operation
            torch.testing.assert_close(got, want, rtol=bound, atol=bound)
        projected = torch.randn(tokens, rank + count).to(dtype)
        for weights in (None, residual):
            both = [None if weights is None else weights.clone() for _ in range(2)]
            want, got = (of.gate(projected, rank, count, r) for of, r in zip((IN_TORCH, kernels), both))
            torch.testing.assert_close(got, want, rtol=bound, atol=bound)
            if both[0] is not None and both[1] is not None:
                torch.testing.assert_close(both[1], both[0], rtol=bound, atol=bound)
                assert torch.equal(both[1][:, :wide], residual[:, :wide]) and not torch.equal(both[1], residual)
        gates, normed = (torch.randn(tokens, wide).to(dtype) for _ in range(2))
        want, got = (of.read(gates, normed, count) for of in (IN_TORCH, kernels))
        torch.testing.assert_close(got, want, rtol=bound, atol=bound)


def test_no_tokens(library: Library) -> None:
    """Of an idle attention group."""
    kernels, none = CpuGatedStreams(library).kernels, torch.zeros(0, 10)
    assert kernels.norm(None, none, torch.ones(2, 4), 1e-5).shape == (0, 8)
    assert kernels.gate(torch.zeros(0, 5), 3, 2, none).shape == (0, 3)
    assert kernels.read(none[:, :8], none[:, :8], 2).shape == (0, 4)
