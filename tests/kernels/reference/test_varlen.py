"""Attention within runs of every row that runs on a CPU against its formula in float64."""

from __future__ import annotations

import random

import pytest
import torch

from moe_engine.kernels import tables
from moe_engine.kernels.registry import Choice


def compare(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """Random runs, some neighbors of equal length, of queries, keys and values that are views of one product."""
    heads, width = random.choice(((2, 20), (3, 16), (1, 40)))
    lens = [random.randint(1, 40) for _ in range(random.randint(1, 4))]
    lens += [lens[-1]] * random.randint(0, 2)
    qkv = torch.randn(sum(lens), 3 * heads, width).to(dtype)
    q, k, v = qkv.split(heads, 1)
    row = next(row for row in tables.VARLEN if row.name == name)
    found = Choice("varlen", row, "test").build().run(q, k, v, lens, 0.3)
    start = 0
    for length in lens:
        own = [part[start : start + length].double() for part in (q, k, v)]
        scores = torch.einsum("qhd,khd->hqk", own[0], own[1]) * 0.3
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), own[2])
        assert torch.allclose(found[start : start + length].double(), expected, atol=tolerance, rtol=tolerance)
        start += length
    assert found.is_contiguous() and found.dtype == dtype


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_torch(dtype: torch.dtype, tolerance: float) -> None:
    compare("torch", dtype, tolerance)
