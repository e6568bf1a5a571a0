"""Rows of rounded caches in Triton, under the interpreter: the numbers of separate operations."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from moe_engine.kernels.ops.block_rounding import ROUNDINGS, round_rows
from moe_engine.kernels.ops.protocol import CacheRows, RotaryTable
from moe_engine.kernels.ops.reference import TorchOps

kernel = pytest.importorskip("moe_engine.kernels.ops.triton_block_rounding", reason="needs triton")


def table_of(width: int, interleaved: bool = True) -> RotaryTable:
    angles = torch.rand(100, width // 2) * 6.3
    return RotaryTable(torch.cat((angles.cos(), angles.sin()), 1), interleaved)


def spread(*shape: int) -> torch.Tensor:
    """Numbers whose blocks have scales of many sizes; some blocks are zeros, some numbers halfway between two."""
    x = torch.randn(shape) * torch.randint(-20, 12, (*shape[:-1], 1)).float().exp2()
    x[..., : shape[-1] // 4] = (x[..., : shape[-1] // 4] * 4).round() / 4
    return x * (torch.rand(shape[0], *[1] * (len(shape) - 1)) > 0.2)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("width", "rotary"), [(512, 64), (128, 64), (48, 8), (40, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.each_value
def test_rows(rounding: str, width: int, rotary: int, dtype: torch.dtype) -> None:
    """In a cache after a norm, with queries that are rotated, and heads that stay where they are. Float32: values at
    the bound between two numbers of a format may differ by one, of a few."""
    tokens, table = 9, table_of(rotary)
    positions, slots = torch.randint(100, (tokens,)), torch.randperm(30)[:tokens]
    x, weight = spread(tokens, 2 * width).to(dtype), 1 + 0.2 * torch.randn(width)
    caches = torch.randn(2, 30, width).to(dtype)
    caches[1] = caches[0]
    norm = weight.to(dtype), 1e-20
    kept = x.clone()
    queries = torch.randn(1, tokens, 3, width + 8).to(dtype).repeat(2, 1, 1, 1)
    for call, cache, q in zip((kernel.round_rows, partial(round_rows, TorchOps())), caches, queries):
        to = CacheRows(slots, cache)
        assert call(x[:, None, width:].clone(), norm, positions, table, rounding, to, q[..., 8:]) is cache
    same(*caches, rounding)
    torch.testing.assert_close(*queries, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    heads = spread(tokens, 3, width).to(dtype)
    found = kernel.round_rows(heads.clone(), None, positions, table, rounding, None)
    wanted = round_rows(TorchOps(), heads.clone(), None, positions, table, rounding, None)
    same(found, wanted, rounding)
    assert torch.equal(x, kept)


def same(found: torch.Tensor, wanted: torch.Tensor, rounding: str) -> None:
    """Equal but for numbers that sums in another order moved over a bound of rounding; close where no block is
    rounded."""
    if wanted.shape[-1] % (16 if rounding == "e2m1_small" else 32):
        bound = 1e-5 if wanted.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found, wanted, rtol=bound, atol=bound * float(wanted.abs().amax()))
        return
    other = (found != wanted).float().mean()
    assert other < 0.005, other
    torch.testing.assert_close(found, wanted, rtol=0.5, atol=float(wanted.abs().amax()) / 8)


def test_bounds_of_the_formats() -> None:
    """Without rotation every number is that of torch: ties, zeros, signs, the largest numbers."""
    still = RotaryTable(torch.cat((torch.ones(1, 4), torch.zeros(1, 4)), 1), True)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 6.0, 448.0, -448.0, 0.0, -0.0, 1e-30, 17.0, 3e-3])
    sizes = torch.tensor([2.0**-120, 2.0**-8, 1.0, 3.0]).view(4, 1, 1)
    x = torch.cat((ties, torch.randn(48) * 100)).view(1, 1, 64) * sizes
    for rounding, plain in ROUNDINGS.items():
        found = kernel.round_rows(x, None, torch.zeros(4, dtype=torch.int64), still, rounding, None)
        torch.testing.assert_close(found, plain(x), rtol=0, atol=0)


def test_what_the_kernel_refuses() -> None:
    x, positions = torch.randn(2, 2, 32), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="interleaved pairs"):
        kernel.round_rows(x, None, positions, table_of(8, False), "e4m3", None)
    with pytest.raises(ValueError, match="one head"):
        kernel.round_rows(x, None, positions, table_of(8), "e4m3", CacheRows(positions, torch.zeros(4, 32)))
