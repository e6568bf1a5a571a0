"""Attention of decodes whose contexts begin with the same slots: against the formula, and with the bits of each request
alone."""

from __future__ import annotations

import random

import pytest
import torch

from moe_engine.kernels.attention.cpu import CpuGQA, CpuMLA
from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.queries import PagedQueries
from tests.kernels.cpu.conftest import threads
from tests.kernels.cpu.formulas import absorbed_attention, close_each, grouped_attention, normal, only, paged_queries

PREFIXES = (0, 1, 63, 64, 65, 200, 511, 512, 513, 640, 1100)


def begun_alike() -> tuple[PagedQueries, int]:
    """Prompts and decodes, of which some neighbors have a prefix in common, in any order of groups; the pool's size."""
    lens, groups = [], []
    for group in range(random.randint(2, 4)):
        prefix = random.choice(PREFIXES)
        for _ in range(random.randint(1, 9)):
            count = random.randint(2, 70) if random.random() < 0.1 else 1
            lens.append((count, prefix + random.choice((0, random.randint(0, 80), 600)) + count))
            groups.append((group, prefix))
    queries, size = paged_queries(lens, 1)
    first: dict[int, int] = {}
    for request, (group, prefix) in enumerate(groups):
        rows = queries.rows.tolist()
        other = first.setdefault(group, rows[request])
        shared = random.randint(0, prefix) if random.random() < 0.1 else prefix
        queries.slot_table[rows[request], :shared] = queries.slot_table[other, :shared]
    return queries, size


@pytest.mark.parametrize(
    ("heads", "groups", "width", "value"), [(12, 4, 64, 64), (8, 8, 80, 80), (24, 2, 128, 96), (3, 3, 33, 33)]
)
def test_grouped_queries(
    any_library: Library, dtype: torch.dtype, heads: int, groups: int, width: int, value: int
) -> None:
    queries, size = begun_alike()
    gqa, q = CpuGQA(any_library), normal(queries.num_tokens, heads, width, dtype=dtype)
    k, v = (normal(size, groups, each, dtype=dtype) for each in (width, value))
    with threads(random.choice((1, 2, 5))):
        found = gqa.paged(q, k, v, queries, 0.1, None)
        bounded = gqa.paged(q, k, v, queries, 0.1, None, None, 0.7)  # as Gemma 2 bounds scores
    close_each(found, grouped_attention(q, k, v, queries, 0.1), queries, 2)
    assert not torch.equal(bounded, found)
    for request, mine in enumerate(q.split(queries.query_lens)):
        for cap, whole in ((0.0, found), (0.7, bounded)):
            alone = gqa.paged(mine, k, v, only(queries, request), 0.1, None, None, cap)
            assert torch.equal(alone, whole.split(queries.query_lens)[request]), (request, cap)


def test_latents(any_library: Library, dtype: torch.dtype) -> None:
    queries, size = begun_alike()
    mla, q = CpuMLA(any_library), normal(queries.num_tokens, 16, 96, dtype=dtype)
    cache = normal(size, 96, dtype=dtype)
    with threads(2):
        found = mla.absorbed(q, cache, queries, 0.1, None, 64)
    close_each(found, absorbed_attention(q, cache, queries, 0.1, 64), queries, 2)
    for request, mine in enumerate(q.split(queries.query_lens)):
        alone = mla.absorbed(mine, cache, only(queries, request), 0.1, None, 64)
        assert torch.equal(alone, found.split(queries.query_lens)[request]), request
