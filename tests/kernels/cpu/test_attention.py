"""Paged attention: against the plain formula, on shuffled pages with NaN between them; bits do not depend on the
batch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from moe_engine.kernels.attention.cpu import CpuGQA, CpuMLA
from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.queries import AttentionBatch
from tests.kernels.cpu.conftest import threads
from tests.kernels.cpu.formulas import (
    absorbed_attention,
    close,
    close_each,
    expanded_attention,
    filled_cache,
    grouped_attention,
    normal,
    only,
    paged_queries,
    random_trees,
    slots_of,
)

pytestmark = pytest.mark.drawn(80)

LENS = [(1, 1), (1, 70), (3, 3), (1, 600), (5, 131), (2, 64), (16, 1100)]
ROTARY = 64


@pytest.mark.parametrize(("heads", "latent", "page_size"), [(16, 512, 16), (3, 40, 1), (20, 64, 64), (128, 96, 8)])
def test_absorbed(any_library: Library, dtype: torch.dtype, heads: int, latent: int, page_size: int) -> None:
    mla = CpuMLA(any_library)
    queries, size = paged_queries(LENS, page_size)
    cache = filled_cache(queries, size, latent + ROTARY, dtype=dtype)
    q = normal(queries.num_tokens, heads, latent + ROTARY, dtype=dtype)
    plan = mla.plan(AttentionBatch(queries, None))
    scale = 0.7 * (latent + ROTARY) ** -0.5
    close(mla.absorbed(q, cache, queries, scale, plan), absorbed_attention(q, cache, queries, scale, latent), 2)


def test_absorbed_other_rotary_width_and_strided_queries(any_library: Library, dtype: torch.dtype) -> None:
    mla = CpuMLA(any_library)
    queries, size = paged_queries([(2, 90), (1, 5)])
    cache = filled_cache(queries, size, 33, dtype=dtype)
    q = normal(3, 2, 50, dtype=dtype)[..., 11:44]
    got = mla.absorbed(q, cache, queries, 0.2, None, value_width=27)
    close(got, absorbed_attention(q, cache, queries, 0.2, 27), 2)


def test_absorbed_bits_do_not_depend_on_batch_or_pages(any_library: Library, dtype: torch.dtype) -> None:
    mla = CpuMLA(any_library)
    queries, size = paged_queries(LENS, 16)
    cache = filled_cache(queries, size, 128, dtype=dtype)
    q = normal(queries.num_tokens, 16, 128, dtype=dtype)
    whole = mla.absorbed(q, cache, queries, 0.1, None).split(queries.query_lens)
    for request, mine in enumerate(q.split(queries.query_lens)):
        alone = only(queries, request)
        assert torch.equal(mla.absorbed(mine, cache, alone, 0.1, None), whole[request])
        first = slice(0, 1)
        alone = only(queries, request, first)
        assert torch.equal(mla.absorbed(mine[first], cache, alone, 0.1, None), whole[request][first])
    with threads(1):
        again = mla.absorbed(q, cache, queries, 0.1, None)
    assert torch.equal(again, torch.cat(whole))
    moved, size = paged_queries(LENS, 1, shuffle=False)
    other = torch.full((size, 128), float("nan"), dtype=dtype)
    for request in range(len(LENS)):
        other[slots_of(moved, request)] = cache[slots_of(queries, request)]
    assert torch.equal(mla.absorbed(q, other, moved, 0.1, None), again)


@pytest.mark.parametrize("heads", [16, 4])
def test_few_requests_on_all_threads(any_library: Library, dtype: torch.dtype, heads: int) -> None:
    """Keys, then channels are shared among threads; with one thread each request is one task."""
    mla = CpuMLA(any_library)
    lens = random.choice([[(1, 600)], [(3, 161)], [(1, 1)], [(2, 64), (1, 1030)]])
    queries, size = paged_queries(lens, 8)
    cache = filled_cache(queries, size, 264, dtype=dtype)
    q = normal(queries.num_tokens, heads, 264, dtype=dtype)
    with threads(3):
        got = mla.absorbed(q, cache, queries, 0.1, None, value_width=200)
    close(got, absorbed_attention(q, cache, queries, 0.1, 200), 2)
    with threads(1):
        assert torch.equal(mla.absorbed(q, cache, queries, 0.1, None, value_width=200), got)


def test_gather(library: Library, dtype: torch.dtype) -> None:
    mla = CpuMLA(library)
    queries, size = paged_queries(LENS, 16)
    cache = filled_cache(queries, size, 72, dtype=dtype)
    want = torch.cat([cache[slots_of(queries, r)] for r in range(len(LENS))])
    assert torch.equal(mla.gather_latent(cache, queries, None), want)


@pytest.mark.parametrize(("nope", "rotary", "value"), [(128, 64, 128), (32, 16, 48), (21, 10, 19)])
def test_expanded(any_library: Library, dtype: torch.dtype, nope: int, rotary: int, value: int) -> None:
    mla = CpuMLA(any_library)
    lens = [(1, 1), (200, 200), (37, 600), (1, 65), (130, 1024)]
    queries, _ = paged_queries(lens)
    context = queries.num_context_tokens
    q, kv = normal(queries.num_tokens, 3, nope + rotary, dtype=dtype), normal(context, 3, nope + value, dtype=dtype)
    rope = normal(context, rotary + 6, dtype=dtype)[:, 3 : 3 + rotary]
    plan = mla.plan(AttentionBatch(None, queries))
    got = mla.expanded(q, kv, rope, queries, 0.1, plan)
    close(got, expanded_attention(q, kv, rope, queries, 0.1), 2)
    with threads(1):
        assert torch.equal(mla.expanded(q, kv, rope, queries, 0.1, plan), got)
    # The second request alone, and in two chunks.
    mine, keys, tail = q[1:201], kv[1:201], rope[1:201]
    assert torch.equal(mla.expanded(mine, keys, tail, only(queries, 1), 0.1, None), got[1:201])
    for chunk in (slice(0, 77), slice(77, 200)):
        some = only(queries, 1, chunk)
        part = mla.expanded(mine[chunk], keys[: chunk.stop], tail[: chunk.stop], some, 0.1, None)
        assert torch.equal(part, got[1:201][chunk])


@pytest.mark.parametrize(("nope", "rotary", "value"), [(32, 32, 64), (20, 12, 40), (64, 0, 32)])
@pytest.mark.parametrize("length", [1, 77, 512])
def test_expanded_contexts_that_share_rows(
    any_library: Library, dtype: torch.dtype, length: int, nope: int, rotary: int, value: int
) -> None:
    """The bits of separate contexts, for any end of the shared rows."""
    mla = CpuMLA(any_library)
    queries, _ = paged_queries([(1, length + 1), (30, length + 30), (16, length + 90), (5, length + 333)])
    own = [context - length for context in queries.context_lens]
    kv = normal(length + sum(own), 2, nope + value, dtype=dtype)
    rope = normal(length + sum(own), rotary + 4, dtype=dtype)[:, :rotary]
    places, first = [], length
    for count in own:
        places.append(torch.cat((torch.arange(length), torch.arange(first, first + count))))
        first += count
    table = torch.full((max(queries.rows.tolist()) + 1, length + max(own)), 2**30, dtype=torch.int32)
    for row, mine in zip(queries.rows.tolist(), places):
        table[row, : len(mine)] = mine
    shared = replace(queries, slot_table=table)
    q = normal(queries.num_tokens, 2, nope + rotary, dtype=dtype)
    apart = torch.cat(places)
    want = mla.expanded(q, kv[apart], rope[apart], queries, 0.1, mla.plan(AttentionBatch(None, queries)))
    got = mla.expanded_shared(q, kv, rope, shared, 0.1, mla.plan(AttentionBatch(None, shared)))
    assert torch.isfinite(got).all() and torch.equal(got, want)


@pytest.mark.parametrize(
    ("heads", "groups", "width", "value"),
    [
        (8, 2, 64, 64), (6, 6, 80, 80), (4, 1, 96, 96), (8, 8, 128, 128), (16, 2, 256, 256), (3, 1, 33, 33),
        (16, 1, 192, 128), (4, 2, 24, 40),
    ],
)  # fmt: skip
def test_paged(any_library: Library, dtype: torch.dtype, heads: int, groups: int, width: int, value: int) -> None:
    gqa = CpuGQA(any_library)
    queries, size = paged_queries([*LENS, (140, 160)], 16)
    k_cache, v_cache = (filled_cache(queries, size, groups, each, dtype=dtype) for each in (width, value))
    q = normal(queries.num_tokens, heads, width, dtype=dtype)
    scale = width**-0.5
    got = gqa.paged(q, k_cache, v_cache, queries, scale, gqa.plan(AttentionBatch(queries, None)))
    close(got, grouped_attention(q, k_cache, v_cache, queries, scale), 2)
    whole = got.split(queries.query_lens)
    for request, mine in enumerate(q.split(queries.query_lens)):
        last = slice(len(mine) - 1, len(mine))
        alone = only(queries, request, last)
        assert torch.equal(gqa.paged(mine[last], k_cache, v_cache, alone, scale, None), whole[request][last])
    with threads(1):
        assert torch.equal(gqa.paged(q, k_cache, v_cache, queries, scale, None), got)


TREES = [(1, 1), (1, 70), (7, 7), (64, 64), (5, 131), (16, 526), (64, 700), (40, 64)]


def test_trees(any_library: Library, dtype: torch.dtype) -> None:
    """Draft trees in both paged forms, over empty and long contexts; other branches must have no influence."""
    mla, gqa = CpuMLA(any_library), CpuGQA(any_library)
    plain, size = paged_queries(TREES, 16)
    queries, trees = random_trees(plain)
    cache, v_cache = (filled_cache(queries, size, 2, 96, dtype=dtype) for _ in range(2))
    q = normal(queries.num_tokens, 6, 96, dtype=dtype)
    plan = mla.plan(AttentionBatch(queries, None))
    latent = mla.absorbed(q, cache[:, 0], queries, 0.1, plan)
    paged = gqa.paged(q, cache, v_cache, queries, 0.1, plan)
    close_each(latent, absorbed_attention(q, cache[:, 0], queries, 0.1, 32, trees), queries, 2)
    close_each(paged, grouped_attention(q, cache, v_cache, queries, 0.1, trees), queries, 2)
    with threads(1):
        assert torch.equal(mla.absorbed(q, cache[:, 0], queries, 0.1, None), latent)
        assert torch.equal(gqa.paged(q, cache, v_cache, queries, 0.1, None), paged)


def test_a_chain_is_a_tree_with_the_same_bits(library: Library, dtype: torch.dtype) -> None:
    mla = CpuMLA(library)
    plain, size = paged_queries([(3, 70), (16, 520), (64, 64)], 4)
    cache = filled_cache(plain, size, 96, dtype=dtype)
    q = normal(plain.num_tokens, 4, 96, dtype=dtype)
    chain = [(2 << t) - 1 if t < 63 else -1 for count in plain.query_lens for t in range(count)]
    tree = replace(plain, visible=torch.tensor(chain))
    assert torch.equal(mla.absorbed(q, cache, tree, 0.1, None), mla.absorbed(q, cache, plain, 0.1, None))


def test_trees_belong_to_the_paged_forms(library: Library) -> None:
    mla = CpuMLA(library)
    queries, size = paged_queries([(3, 9)])
    queries, _ = random_trees(queries)
    cache = torch.zeros(size, 96)
    with pytest.raises(ValueError, match="gathered"):
        mla.gather_latent(cache, queries, None)
    with pytest.raises(ValueError, match="expanded"):
        mla.expanded(torch.zeros(3, 2, 96), torch.zeros(9, 2, 64), torch.zeros(9, 64), queries, 1.0, None)


def test_no_requests(library: Library, dtype: torch.dtype) -> None:
    queries, _ = paged_queries([])
    q = torch.empty(0, 4, 96, dtype=dtype)
    cache = torch.empty(8, 96, dtype=dtype)
    mla, gqa = CpuMLA(library), CpuGQA(library)
    assert mla.absorbed(q, cache, queries, 1.0, None).shape == (0, 4, 32)
    assert mla.gather_latent(cache, queries, None).shape == (0, 96)
    kv, rope = torch.empty(0, 4, 64, dtype=dtype), torch.empty(0, 64, dtype=dtype)
    assert mla.expanded(q, kv, rope, queries, 1.0, None).shape == (0, 4, 32)
    assert gqa.paged(q, cache.unsqueeze(1), cache.unsqueeze(1), queries, 1.0, None).shape == (0, 4, 96)


def test_large_scores_do_not_overflow(library: Library, dtype: torch.dtype) -> None:
    mla = CpuMLA(library)
    queries, size = paged_queries([(2, 700)])
    cache = filled_cache(queries, size, 128, dtype=dtype)
    q = normal(2, 16, 128, dtype=dtype, scale=60.0)
    want = absorbed_attention(q, cache, queries, 1.0, 64)
    got = mla.absorbed(q, cache, queries, 1.0, None)
    if dtype != torch.float32:
        close(got, want, 4)
        return
    # a score differs by about 2 units in its last place (sums of 128 products in lanes), so that the weights of two
    # nearly equal keys, at most w (1 - w) <= 1/4 of it each, move their values by a unit times the values' distance
    keys = cache[~cache.isnan().any(-1)].double()
    unit = 2.0 ** (torch.log2((q.double() @ keys.T).abs().max()).floor() - 23)
    spread = (keys[:, :64].max(0).values - keys[:, :64].min(0).values).max()
    worst, limit = (got.double() - want).abs().max(), unit * spread
    assert worst <= limit, f"off by {worst:.3g}, allowed {limit:.3g}"
