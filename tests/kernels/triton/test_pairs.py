"""Entries of two tokens in Triton, under the interpreter, against float64."""

from __future__ import annotations

import random

import pytest
import torch

from moe_engine.kernels.compression.protocol import CompressedTokens, Kept

triton_pairs = pytest.importorskip("moe_engine.kernels.compression.triton_pairs", reason="needs triton")


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "apart"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_sums_of_two_tokens(dtype: torch.dtype, bound: float, keep: bool) -> None:
    """Prompts, decodes and drafts: the first token of an entry is of the step, or in the request's ring."""
    width, each, eps = 40, 4, 1e-5
    lens = [(random.randint(0, 9), count) for count in (5, 1, 1, 3, 2)]  # tokens before the step, and of it
    rows = torch.randperm(7)[: len(lens)].int()
    whole = [torch.randn(before + count, 2 * width).to(dtype) for before, count in lens]
    ring = torch.full((8 * each, 2 * width), float("nan"), dtype=dtype)
    for row, (before, _), part in zip(rows.tolist(), lens, whole):
        for position in range(max(0, before - each), before):
            ring[(row + 1) * each + position % each] = part[position]
    positions = torch.cat([torch.arange(before, before + count) for before, count in lens])
    counts = torch.tensor([count for _, count in lens])
    starts = torch.tensor([before for before, _ in lens]).repeat_interleave(counts)
    of_token = rows.repeat_interleave(counts)
    slots = torch.randperm(200)[: len(positions)] * 2 + positions % 2
    tokens = CompressedTokens(positions, starts, of_token, torch.zeros(7, 1, dtype=torch.int32), slots)
    kept, weight = Kept(ring.clone(), each, 0), torch.rand(width) + 0.5
    projected = torch.cat([part[before:] for part, (before, _) in zip(whole, lens)])
    places = torch.arange(len(positions)) % each if keep else None  # of the ring of padding, which is not read
    found = triton_pairs.sum_pairs(projected, kept, (weight, eps), tokens, places)
    completes = positions % 2 == 1
    assert torch.equal(found.slots, torch.where(completes, slots // 2, 0))
    assert torch.equal(found.positions, torch.where(completes, positions - 1, 0))
    wanted = []
    for part, (before, count) in zip(whole, lens):
        values, gates = part.double().split(width, 1)
        for position in range(before, before + count):
            if position % 2 == 0:
                wanted.append(torch.zeros(width, dtype=torch.float64))
                continue
            pair = slice(position - 1, position + 1)
            mixed = (gates[pair].softmax(0) * values[pair]).sum(0)
            wanted.append(mixed * (mixed.square().mean() + eps).rsqrt() * weight.double())
    torch.testing.assert_close(found.entries.double(), torch.stack(wanted), rtol=bound, atol=bound)
    if keep:
        assert all(any(torch.equal(kept.rows[i], line) for line in projected[i::each]) for i in range(each))
    torch.testing.assert_close(kept.rows[each * keep :], ring[each * keep :], rtol=0, atol=0, equal_nan=True)
