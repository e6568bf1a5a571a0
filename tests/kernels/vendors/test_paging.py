"""Lists of pages for libraries."""

from __future__ import annotations

import random

import torch

from moe_engine.kernels.attention.vendors.paging import Paged
from moe_engine.kernels.queries import PagedQueries


def test_the_pages_are_those_of_the_lengths_on_the_host() -> None:
    """A captured draft is planned before the lengths on the device are set."""
    size, lens = random.choice([1, 4, 16]), [random.randint(1, 60) for _ in range(random.randint(1, 5))]
    count, pages = len(lens), -(-60 // size)
    numbers = torch.randperm(count * pages).view(count, pages).int()
    table = (numbers.unsqueeze(2) * size + torch.arange(size)).flatten(1).int()
    rows, starts = torch.arange(count, dtype=torch.int32), torch.arange(count + 1, dtype=torch.int32)
    queries = PagedQueries([1] * count, lens, rows, starts, torch.zeros_like(rows), table, size)
    expected = [number for row, kv in zip(numbers.tolist(), lens) for number in row[: -(-kv // size)]]
    assert Paged.of(queries).flat.tolist() == expected
