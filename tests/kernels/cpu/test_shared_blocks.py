"""Attention of single tokens whose contexts have blocks in common, as selections have: against the formula, and with
the bits of each token alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.attention.cpu import CpuGQA, CpuMLA
from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.queries import PagedQueries
from tests.kernels.cpu.conftest import threads
from tests.kernels.cpu.formulas import absorbed_attention, close_rows, grouped_attention, normal, only

POOL = 1500
Draw = Callable[[int], list[list[int]]]


def blocks_of(size: int, page: int, chosen: int, ordered: bool = True) -> Draw:
    """Some blocks of one context on pages in any order, and its last block, of which tokens see a part."""

    def draw(count: int) -> list[list[int]]:
        pages, lists = torch.randperm(POOL // page), []
        slots = (pages[:, None] * page + torch.arange(page)).flatten().tolist()
        last = random.randint(len(slots) // size // 2, len(slots) // size - 1)
        for _ in range(count):
            blocks = random.sample(range(last), min(last, random.randint(chosen // 2, chosen)))
            blocks = sorted(blocks) if ordered else blocks
            own = last * size
            tail = slots[own : own + random.randint(1, size)]
            lists.append([slots[b * size + i] for b in blocks for i in range(size)] + tail)
        return lists

    return draw


def prefixes(count: int) -> list[list[int]]:
    """Tokens of a prompt that see all before them."""
    slots, before = torch.randperm(POOL).tolist(), random.randint(1, 600)
    return [slots[: before + i] for i in range(count)]


def repeats(count: int) -> list[list[int]]:
    """Three blocks, most of them twice or more in a list: no order is that of all lists."""
    blocks = torch.randint(0, POOL, (3, 64)).tolist()
    lists = ([random.choice(blocks) for _ in range(random.randint(1, 12))] for _ in range(count))
    return [[slot for block in own for slot in block] + [random.randrange(POOL)] * 3 for own in lists]


DRAWS = {
    "blocks": blocks_of(128, 16, 9), "pages of a token": blocks_of(64, 1, 6), "odd blocks": blocks_of(24, 8, 30),
    "any order": blocks_of(64, 16, 9, ordered=False), "prefixes": prefixes, "repeats": repeats,
}  # fmt: skip


def queries_of(lists: list[list[int]]) -> PagedQueries:
    counts = [len(slots) for slots in lists]
    table = torch.full((len(lists), max(counts) + 1), -1, dtype=torch.int32)
    for row, slots in zip(table, lists):
        row[: len(slots)] = torch.tensor(slots)
    numbers = torch.arange(len(lists) + 1, dtype=torch.int32)
    ones = [1] * len(lists)
    return PagedQueries(ones, counts, numbers[:-1], numbers, torch.tensor(counts, dtype=torch.int32), table, 1)


def check(run: Callable[[Tensor, PagedQueries], Tensor], q: Tensor, queries: PagedQueries, want: Tensor) -> None:
    with threads(random.choice((1, 2))):
        found = run(q, queries)
    close_rows(found, want, 2)
    for token in random.sample(range(len(q)), 6):
        assert torch.equal(run(q[token : token + 1], only(queries, token)), found[token : token + 1]), token


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(("heads", "width", "value"), [(16, 128, 128), (5, 40, 24), (24, 64, 64)])
@pytest.mark.each_value
def test_keys_of_one_head(
    any_library: Library, dtype: torch.dtype, draw: str, heads: int, width: int, value: int
) -> None:
    """Rows of the cache may be one head's of several: their distance is not their width."""
    queries = queries_of(DRAWS[draw](random.randint(33, 90)))
    k, v = (normal(POOL, 2, size, dtype=dtype)[:, :1] for size in (width, value))
    q, kernel = normal(queries.num_tokens, heads, width, dtype=dtype), CpuGQA(any_library)
    want = grouped_attention(q, k, v, queries, 0.1)
    check(lambda q, queries: kernel.paged(q, k, v, queries, 0.1, None), q, queries, want)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("heads", [16, 40, 128])
@pytest.mark.each_value
def test_latents(any_library: Library, dtype: torch.dtype, draw: str, heads: int) -> None:
    queries = queries_of(DRAWS[draw](random.randint(33, 60)))
    cache, q = normal(POOL, 96, dtype=dtype), normal(queries.num_tokens, heads, 96, dtype=dtype)
    kernel, sinks = CpuMLA(any_library), torch.randn(heads)
    want = absorbed_attention(q, cache, queries, 0.1, 64)
    check(lambda q, queries: kernel.absorbed(q, cache, queries, 0.1, None, 64), q, queries, want)
    found = kernel.absorbed(q, cache, queries, 0.1, None, 64, sinks)
    alone = kernel.absorbed(q[7:8], cache, only(queries, 7), 0.1, None, 64, sinks)
    assert torch.equal(found[7:8], alone)
