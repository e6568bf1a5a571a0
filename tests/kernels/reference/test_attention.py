"""Attention of the torch rows against a loop over tokens and heads in float64, slots shuffled and NaN elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.attention import reference
from moe_engine.kernels.attention.reference import TorchGQA, TorchMLA
from moe_engine.kernels.queries import PagedQueries

LENGTHS = [(1, 7), (4, 4), (3, 11), (1, 1)]  # (query tokens, context) of each request


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def paged(num_slots: int = 64) -> PagedQueries:
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(1))[:48].view(4, 12).int()
    starts = torch.tensor([0] + [q for q, _ in LENGTHS]).cumsum(0).int()
    return PagedQueries(
        query_lens=[q for q, _ in LENGTHS],
        context_lens=[c for _, c in LENGTHS],
        rows=torch.tensor([2, 0, 3, 1], dtype=torch.int32),
        query_starts=starts,
        context_lens_device=torch.tensor([c for _, c in LENGTHS], dtype=torch.int32),
        slot_table=slots,
        page_size=1,
    )


def slots_of(queries: PagedQueries, i: int) -> Tensor:
    return queries.slot_table[int(queries.rows[i]), : queries.context_lens[i]].long()


def cache_for(queries: PagedQueries, *shape: int, seed: int) -> Tensor:
    """Random in the requests' slots, NaN in every other slot."""
    cache = torch.full((64, *shape), float("nan"))
    for i in range(queries.num_requests):
        cache[slots_of(queries, i)] = rand(queries.context_lens[i], *shape, seed=seed + i)
    return cache


def softmax_mix(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """q [W], keys [s, W], values [s, V] -> [V] in float64."""
    return torch.softmax(keys.double() @ q.double() * scale, 0) @ values.double()


def each_query(queries: PagedQueries) -> list[tuple[int, int, int]]:
    """(token, request, visible context) of every query token."""
    out, token = [], 0
    for i, (num_queries, context) in enumerate(LENGTHS):
        for j in range(num_queries):
            out.append((token, i, context - num_queries + j + 1))
            token += 1
    return out


@pytest.fixture(params=[1 << 24, 1])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with one block of scores, once with one query at a time."""
    monkeypatch.setattr(reference, "MAX_SCORES", request.param)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("rotary", [64, 6])
def test_absorbed(rotary: int) -> None:
    queries, latent, heads = paged(), 10, 3
    q, cache = rand(9, heads, latent + rotary, seed=9), cache_for(queries, latent + rotary, seed=20)
    width = {} if rotary == 64 else {"value_width": latent}
    got = TorchMLA().absorbed(q, cache, queries, 0.3, None, **width)  # type: ignore[arg-type]
    assert got.shape == (9, heads, latent)
    for token, i, seen in each_query(queries):
        rows = cache[slots_of(queries, i)[:seen]]
        for h in range(heads):
            want = softmax_mix(q[token, h], rows, rows[:, :latent], 0.3)
            torch.testing.assert_close(got[token, h].double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("block")
def test_gather_and_expanded() -> None:
    queries, heads, nope, rotary, value = paged(), 3, 5, 4, 7
    cache = cache_for(queries, 10 + rotary, seed=30)
    context = TorchMLA().gather_latent(cache, queries, None)
    assert torch.equal(context, torch.cat([cache[slots_of(queries, i)] for i in range(4)]))
    q, kv = rand(9, heads, nope + rotary, seed=2), rand(context.shape[0], heads, nope + value, seed=3)
    k_rope = context[:, 10:]
    got = TorchMLA().expanded(q, kv, k_rope, queries, 0.4, None)
    starts = torch.tensor([0] + queries.context_lens).cumsum(0).tolist()
    for token, i, seen in each_query(queries):
        span = slice(starts[i], starts[i] + seen)
        for h in range(heads):
            keys = torch.cat((kv[span, h, :nope], k_rope[span]), 1)
            want = softmax_mix(q[token, h], keys, kv[span, h, nope:], 0.4)
            torch.testing.assert_close(got[token, h].double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_paged(groups: int) -> None:
    queries, heads, width = paged(), 4, 6
    q = rand(9, 2 * heads, width, seed=4)[:, :heads]
    k_cache, v_cache = (cache_for(queries, groups, width, seed=seed) for seed in (40, 50))
    got = TorchGQA().paged(q, k_cache, v_cache, queries, 0.5, None)
    for token, i, seen in each_query(queries):
        slots = slots_of(queries, i)[:seen]
        for h in range(heads):
            group = h // (heads // groups)
            want = softmax_mix(q[token, h], k_cache[slots, group], v_cache[slots, group], 0.5)
            torch.testing.assert_close(got[token, h].double(), want, rtol=1e-4, atol=1e-5)


def test_low_precision_is_computed_in_float32() -> None:
    queries, heads, width = paged(), 2, 8
    q = rand(9, heads, width).bfloat16()
    k_cache, v_cache = (cache_for(queries, 1, width, seed=seed).bfloat16() for seed in (1, 2))
    got = TorchGQA().paged(q, k_cache, v_cache, queries, 0.5, None)
    wide = TorchGQA().paged(q.float(), k_cache.float(), v_cache.float(), queries, 0.5, None)
    assert torch.equal(got, wide.bfloat16())


PARENTS = {1: [-1, 0, 0, 2], 2: [-1, 0, 0]}  # requests 1 and 2 of LENGTHS as trees: each query token's parent


def trees(queries: PagedQueries) -> tuple[PagedQueries, dict[tuple[int, int], list[int]]]:
    """The queries with `visible`, and by (request, query token) the query tokens on its path to the root."""
    bits, paths = [], {}
    for i, (num_queries, _) in enumerate(LENGTHS):
        for j in range(num_queries):
            path, at = [], j
            while at >= 0:
                path.append(at)
                at = PARENTS.get(i, [-1])[at]
            paths[i, j] = sorted(path)
            bits.append(sum(1 << b for b in path))
    return replace(queries, visible=torch.tensor(bits)), paths


@pytest.mark.usefixtures("block")
def test_trees() -> None:
    queries, paths = trees(paged())
    q, cache = rand(9, 4, 12, seed=9), cache_for(queries, 2, 12, seed=20)
    v_cache = cache_for(queries, 2, 12, seed=60)
    latent = TorchMLA().absorbed(q, cache[:, 0], queries, 0.3, None, value_width=10)
    mixed = TorchGQA().paged(q, cache, v_cache, queries, 0.3, None)
    for (token, i, _), path in zip(each_query(queries), paths.values()):
        before = LENGTHS[i][1] - LENGTHS[i][0]
        seen = slots_of(queries, i)[[*range(before), *(before + b for b in path)]]
        for h in range(4):
            want = softmax_mix(q[token, h], cache[seen, 0], cache[seen, 0, :10], 0.3)
            torch.testing.assert_close(latent[token, h].double(), want, rtol=1e-4, atol=1e-5)
            want = softmax_mix(q[token, h], cache[seen, h // 2], v_cache[seen, h // 2], 0.3)
            torch.testing.assert_close(mixed[token, h].double(), want, rtol=1e-4, atol=1e-5)


def test_a_tree_has_at_most_64_tokens_and_no_expanded_form() -> None:
    queries, _ = trees(paged())
    with pytest.raises(ValueError, match="gathered"):
        TorchMLA().gather_latent(cache_for(queries, 12, seed=1), queries, None)
    with pytest.raises(ValueError, match="expanded"):
        TorchMLA().expanded(rand(9, 2, 12), rand(23, 2, 16), rand(23, 4), queries, 1.0, None)
    with pytest.raises(ValueError, match="64 query tokens"):
        replace(queries, query_lens=[65], visible=torch.ones(65, dtype=torch.int64))
    with pytest.raises(ValueError, match="int64"):
        replace(queries, visible=torch.ones(9, dtype=torch.int32))
