"""Rows of n-gram tables: C++ against torch, with rows of several dtypes and a table of one repeated row."""

from __future__ import annotations

import pytest
import torch

from moe_engine.kernels.ops.hashed_rows import HashedRows
from moe_engine.kernels.ops.ngram_rows import SCALED

PRIMES = (101, 103, 107, 109, 113, 127)
MULTIPLIERS = (2**50 + 1, 2**49 + 3, 2**47 + 9)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_cpp_equals_torch(dtype: torch.dtype, tokens: int) -> None:
    width, count = 2 * SCALED, sum(PRIMES)
    values = torch.randn(count, width).to(dtype)
    scales = torch.randint(100, 140, (count, 2), dtype=torch.uint8) if dtype == torch.float8_e4m3fn else None
    rows = HashedRows(values.view(torch.uint8), dtype, scales, PRIMES, MULTIPLIERS)
    assert rows.in_order
    ids = torch.randint(8000, (tokens, 5), dtype=torch.int32)[:, :3]
    found = rows.read(ids, torch.float32)
    numbers = rows.rows_of(ids)
    assert numbers.shape == (tokens, 6)
    wanted = values.float()
    if scales is not None:
        wanted = (wanted.unflatten(1, (2, SCALED)) * (scales.float() - 127).exp2().unsqueeze(2)).flatten(1)
    assert torch.equal(found, wanted[numbers].flatten(1))
    exact = [int(ids[t, 0]) * MULTIPLIERS[0] ^ int(ids[t, 1]) * MULTIPLIERS[1] for t in range(tokens)]
    assert numbers[:, 1].tolist() == [PRIMES[0] + mixed % PRIMES[1] for mixed in exact]
    rows.__dict__["_function"] = None
    assert not rows.in_order and torch.equal(rows.read(ids, torch.float32), found)


def test_a_repeated_row() -> None:
    table = torch.arange(8, dtype=torch.uint8)[None].expand(sum(PRIMES), -1)
    rows = HashedRows(table, torch.float32, None, PRIMES, MULTIPLIERS)
    found = rows.read(torch.randint(50, (3, 3), dtype=torch.int32), torch.float32)
    assert torch.equal(found, table[0].view(torch.float32).repeat(3, 6))


def test_a_table_in_parts() -> None:
    """The last part has fewer rows."""
    whole, ids = torch.randn(sum(PRIMES), 6), torch.randint(8000, (40, 3), dtype=torch.int32)
    want = HashedRows(whole.view(torch.uint8), torch.float32, None, PRIMES, MULTIPLIERS).read(ids, torch.float32)
    first, *more = (part.clone().view(torch.uint8) for part in whole.split(200))
    rows = HashedRows(first, torch.float32, None, PRIMES, MULTIPLIERS, more=more)
    assert rows.in_order and torch.equal(rows.read(ids, torch.float32), want)
    rows.__dict__["_function"] = None
    assert torch.equal(rows.read(ids, torch.float32), want)


def test_another_table() -> None:
    """As after an update of the weights."""
    ids, count = torch.randint(8000, (40, 3), dtype=torch.int32), sum(PRIMES)
    old, new = (
        HashedRows(
            torch.randint(120, (count, SCALED), dtype=torch.uint8), torch.float8_e4m3fn,
            torch.randint(100, 140, (count, 1), dtype=torch.uint8), PRIMES, MULTIPLIERS,
        )
        for _ in range(2)
    )  # fmt: skip
    before = old.read(ids, torch.float32)
    assert old.layout == new.layout
    old.follow(new)
    found = old.read(ids, torch.float32)
    assert torch.equal(found, new.read(ids, torch.float32)) and not torch.equal(found, before)
    old.__dict__["_function"] = None
    assert torch.equal(old.read(ids, torch.float32), found)
