"""Residual streams with gates of low rank in Triton, under the interpreter, against torch and float64."""

from __future__ import annotations

import random

import pytest
import torch

from moe_engine.kernels.ops import gated_streams
from moe_engine.kernels.ops.gated_streams import IN_TORCH, GatedStreams

TRITON: GatedStreams = pytest.importorskip("moe_engine.kernels.ops.triton_gated_streams", reason="needs triton").TRITON
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
shapes = pytest.mark.parametrize(("count", "width"), [(4, 128), (2, 33), (3, 1100)])


@dtypes
@shapes
def test_norms(count: int, width: int, dtype: torch.dtype) -> None:
    """With a result that is added first, and without; of rows without weights after them. Results that are views."""
    tokens, wide = random.randint(1, 4), count * width
    residual, weight = torch.randn(tokens, wide + count).to(dtype), torch.rand(count, width) + 0.5
    x = torch.randn(tokens, width + 3).to(dtype)[:, :width]
    for given, rows in ((x, residual), (None, residual), (None, residual[:, :wide].contiguous())):
        expected, found = rows.clone(), rows.clone()
        want, got = (of.norm(given, r, weight, 1e-5) for of, r in ((IN_TORCH, expected), (TRITON, found)))
        assert torch.equal(expected, found)
        bound = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got, want, rtol=bound, atol=bound)
        streams = expected[:, :wide].double().unflatten(1, (count, width))
        exact = streams / (streams.square().mean(2, keepdim=True) + 1e-5).sqrt() * weight
        torch.testing.assert_close(got.double(), exact.flatten(1), rtol=bound, atol=bound)
    assert TRITON.norm(None, residual[:0], weight, 1e-5).shape == (0, wide)


@dtypes
@shapes
def test_gates_and_reads(count: int, width: int, dtype: torch.dtype) -> None:
    tokens, rank, bound = random.randint(1, 4), random.choice([5, 16, 320]), 1e-2 if dtype == torch.bfloat16 else 1e-5
    projected = torch.randn(tokens, rank + count).to(dtype)
    residual = torch.randn(tokens, count * (width + 1)).to(dtype)
    for rows in (None, residual):
        both = [None if rows is None else rows.clone() for _ in range(2)]
        want, got = (of.gate(projected, rank, count, r) for of, r in zip((IN_TORCH, TRITON), both))
        torch.testing.assert_close(got, want, rtol=bound, atol=bound)
        if both[0] is not None and both[1] is not None:
            torch.testing.assert_close(both[1], both[0], rtol=bound, atol=bound)
            assert torch.equal(both[1][:, : count * width], residual[:, : count * width])
            assert not torch.equal(both[1], residual)
    gates, normed = (torch.randn(tokens, count * width).to(dtype) for _ in range(2))
    exact = (gates.double().sigmoid() * normed.double()).unflatten(1, (count, width)).mean(1)
    for found in (TRITON.read(gates, normed, count), gated_streams.read_streams(gates, normed, count)):
        torch.testing.assert_close(found.double(), exact, rtol=bound, atol=bound)
