"""Pools of index keys in Triton, under the interpreter, against the torch operations and the formula in float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.indexer import pools
from moe_engine.kernels.indexer.key_norm import KeyNorm
from moe_engine.kernels.indexer.pools import PooledTokens, PoolKernels, PoolRule, PoolTurns
from moe_engine.kernels.ops.protocol import RotaryTable

TRITON: PoolKernels = pytest.importorskip("moe_engine.kernels.indexer.triton_pools", reason="needs triton").TRITON
both = pytest.mark.parametrize("kernels", [pools.TORCH, TRITON], ids=["torch", "triton"])


def slots_of_requests(lens: list[int], size: int) -> Tensor:
    """A table of slots whose pages have two pools each."""
    page, width = 2 * size, -(-max(lens) // (2 * size)) * 2 * size
    pages = torch.randperm(len(lens) * width // page).view(len(lens), -1, 1)
    return (pages * page + torch.arange(page)).flatten(1).int()


def formula(keys: Tensor, gates: Tensor, bias: Tensor, norm: KeyNorm) -> tuple[Tensor, Tensor]:
    """Keys [S, I] and gates of all tokens of a text -> normed keys, keys of its whole pools, in float64."""
    wide, size = keys.double(), len(bias)
    centred = wide - wide.mean(1, keepdim=True)
    own = centred / (centred.square().mean(1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias
    whole = len(keys) // size
    gates, members = (x[: whole * size].unflatten(0, (whole, size)) for x in (gates, own))
    return own, ((gates.double() + bias).softmax(1) * members).sum(1)


@both
@pytest.mark.parametrize(
    ("size", "width", "dtype"), [(4, 128, torch.bfloat16), (2, 24, torch.float32), (5, 32, torch.float32)]
)
def test_keys(kernels: PoolKernels, size: int, width: int, dtype: torch.dtype) -> None:
    """Texts in steps that end within pools: several requests in a step, some with one token, padding on one slot."""
    lens = [1, random.randint(2, 3 * size), 7 * size + 1]
    table = slots_of_requests(lens, size)
    keys, gates = (torch.randn(len(lens), max(lens), width).to(dtype) for _ in range(2))
    norm = KeyNorm(torch.rand(width) + 0.5, torch.randn(width), 1e-6)
    bias, dummy = torch.randn(size, width), table.numel()
    cache = torch.zeros(dummy + size, 1, width, dtype=dtype), torch.zeros(dummy + size, 1, width, dtype=dtype)
    done = [0] * len(lens)
    while done != lens:
        counts = [min(length - start, random.choice([1, 2, size + 1])) for start, length in zip(done, lens)]
        where = [(r, start + i) for r, (start, n) in enumerate(zip(done, counts)) for i in range(n)]
        request, positions = torch.tensor(where).T
        slots = table[request, positions].long()
        given = (torch.cat((x[request, positions], x[0, :1].repeat(2, 1))) for x in (keys, gates))
        step = torch.cat((positions, torch.zeros(2, dtype=torch.int64))), torch.cat((slots, torch.tensor([dummy] * 2)))
        kernels.write(next(given), norm, next(given), bias, *step, cache)
        done = [start + n for start, n in zip(done, counts)]
    bound = 3e-2 if dtype == torch.bfloat16 else 1e-5
    for r, length in enumerate(lens):
        slots = table[r, :length].long()
        own, pooled = formula(keys[r, :length], gates[r, :length], bias, norm)
        own[size - 1 :: size] = pooled
        torch.testing.assert_close(cache[0][slots, 0].double(), own, rtol=bound, atol=bound)
        assert torch.equal(cache[1][slots, 0], gates[r, :length])


@both
@pytest.mark.parametrize("rule", [PoolRule(4, 3), PoolRule(3, 5), PoolRule(2, 8)])
def test_counts_and_slots(kernels: PoolKernels, rule: PoolRule) -> None:
    """Against lists: tokens that see no pool, fewer than are selected, as many, and more."""
    size, most = rule
    seen = [1, size - 1, size, size * most, size * most + 1, size * most + size - 1, *random.sample(range(1, 60), 4)]
    table, rows = slots_of_requests([60] * len(seen), size), torch.randperm(len(seen)).int()
    tokens = PooledTokens(torch.tensor(seen) - 1, rows, table, rule)
    lens, counts = (torch.empty(len(seen), dtype=torch.int32) for _ in range(2))
    kernels.count(tokens, lens, counts)
    width = size * most + size - 1 + random.randrange(3)
    chosen = torch.full((len(seen), most), -1, dtype=torch.int32)
    wanted = []
    for t, (row, count) in enumerate(zip(rows.tolist(), seen)):
        whole, slots = count // size, table[row].tolist()
        picked = sorted(random.sample(range(whole), min(whole, most)))
        chosen[t, : len(picked)] = torch.tensor([slots[p * size] // size for p in picked], dtype=torch.int32)
        own = [slots[p * size + i] for p in picked for i in range(size)] + slots[whole * size : count]
        wanted.append(own + [-1] * (width - len(own)))
        assert (lens[t], counts[t]) == (max(whole, 1), len(own))
    found = torch.zeros(len(seen), width, dtype=torch.int32)
    kernels.place(chosen, tokens, found)
    assert found.tolist() == wanted


@both
def test_slots_without_a_selection(kernels: PoolKernels) -> None:
    seen = torch.tensor([1, 3, 8, 11])
    tokens = PooledTokens(seen - 1, torch.tensor([2, 0, 3, 1]).int(), slots_of_requests([11] * 4, 4), PoolRule(4, 2))
    found = torch.zeros(4, 11, dtype=torch.int32)
    kernels.place(None, tokens, found)
    for row, count, slots in zip(tokens.rows, seen.tolist(), found):
        assert torch.equal(slots[:count], tokens.table[row, :count]) and (slots[count:] == -1).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("size", "width", "dtype"), [(4, 128, torch.bfloat16), (2, 24, torch.float32), (5, 40, torch.float32)]
)
def test_means(size: int, width: int, dtype: torch.dtype, interleaved: bool) -> None:
    """Texts in steps that end within pools, against the formula in float64; padding completes no pool."""
    assert TRITON.write_means is not None
    lens = [1, random.randint(2, 3 * size), 6 * size + 1]
    rotary, table = width // 2 // 4 * 2, slots_of_requests(lens, size)
    angles = torch.rand(max(lens), rotary // 2) * 6
    turned = RotaryTable(torch.cat((angles.cos(), angles.sin()), 1), interleaved)
    keys, weight, dummy = torch.randn(len(lens), max(lens), width).to(dtype), torch.rand(width) + 0.5, table.numel()
    cache, done = torch.zeros(dummy + size, 1, width, dtype=dtype), [0] * len(lens)
    while done != lens:
        counts = [min(length - start, random.choice([1, 2, size + 1])) for start, length in zip(done, lens)]
        where = [(r, start + i) for r, (start, n) in enumerate(zip(done, counts)) for i in range(n)]
        request, places = torch.tensor(where).T
        slots, none = table[request, places].long(), torch.zeros(2, dtype=torch.int64)
        given = torch.cat((keys[request, places], keys[0, :1].repeat(2, 1)))
        turns = PoolTurns(torch.cat((places, none)), torch.cat((places // size * size, none)), turned, size)
        TRITON.write_means(given, weight, 1e-6, turns, torch.cat((slots, none + dummy)), cache)
        done = [start + n for start, n in zip(done, counts)]
    bound = 3e-2 if dtype == torch.bfloat16 else 1e-5
    for r, length in enumerate(lens):
        own = keys[r, :length].double()
        mean = own[: length // size * size].unflatten(0, (-1, size)).mean(1)
        pooled = mean / (mean.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight
        first, second = (0, 1) if interleaved else (0, rotary // 2)
        step = 2 if interleaved else 1
        left = slice(first, rotary if interleaved else rotary // 2, step)
        right = slice(second, rotary, step)
        cos, sin = (part(angles[: length // size * size : size].double()) for part in (torch.cos, torch.sin))
        a, b = pooled[:, left].clone(), pooled[:, right].clone()
        pooled[:, left], pooled[:, right] = a * cos - b * sin, b * cos + a * sin
        own[size - 1 :: size] = pooled
        torch.testing.assert_close(cache[table[r, :length].long(), 0].double(), own, rtol=bound, atol=bound)
