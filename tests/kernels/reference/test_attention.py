"""Attention of the torch rows against its formula in float64, slots shuffled and NaN elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_engine.kernels.attention import reference
from moe_engine.kernels.attention.reference import TorchGQA, TorchMLA
from tests.kernels.cpu.formulas import (
    absorbed_attention,
    close,
    expanded_attention,
    filled_cache,
    grouped_attention,
    normal,
    paged_queries,
    random_trees,
    slots_of,
)

LENS = [(1, 7), (4, 4), (3, 11), (1, 1)]
FP32 = torch.float32


@pytest.fixture(params=[1 << 24, 1])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with one block of scores, once with one query at a time."""
    monkeypatch.setattr(reference, "MAX_SCORES", request.param)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("rotary", [64, 6])
def test_absorbed(rotary: int) -> None:
    (queries, size), latent = paged_queries(LENS), 10
    q, cache = normal(9, 3, latent + rotary, dtype=FP32), filled_cache(queries, size, latent + rotary, dtype=FP32)
    width = {} if rotary == 64 else {"value_width": latent}
    got = TorchMLA().absorbed(q, cache, queries, 0.3, None, **width)  # type: ignore[arg-type]
    close(got, absorbed_attention(q, cache, queries, 0.3, latent))


@pytest.mark.usefixtures("block")
def test_gather_and_expanded() -> None:
    (queries, size), heads, nope, rotary, value = paged_queries(LENS), 3, 5, 4, 7
    cache = filled_cache(queries, size, 10 + rotary, dtype=FP32)
    context = TorchMLA().gather_latent(cache, queries, None)
    assert torch.equal(context, torch.cat([cache[slots_of(queries, i)] for i in range(4)]))
    q, kv = normal(9, heads, nope + rotary, dtype=FP32), normal(len(context), heads, nope + value, dtype=FP32)
    got = TorchMLA().expanded(q, kv, context[:, 10:], queries, 0.4, None)
    close(got, expanded_attention(q, kv, context[:, 10:], queries, 0.4))


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_paged(groups: int) -> None:
    (queries, size), heads, width = paged_queries(LENS), 4, 6
    q = normal(9, 2 * heads, width, dtype=FP32)[:, :heads]
    k_cache, v_cache = (filled_cache(queries, size, groups, width, dtype=FP32) for _ in range(2))
    got = TorchGQA().paged(q, k_cache, v_cache, queries, 0.5, None)
    close(got, grouped_attention(q, k_cache, v_cache, queries, 0.5))


def test_low_precision_is_computed_in_float32() -> None:
    (queries, size), heads, width = paged_queries(LENS), 2, 8
    q = normal(9, heads, width, dtype=torch.bfloat16)
    k_cache, v_cache = (filled_cache(queries, size, 1, width, dtype=torch.bfloat16) for _ in range(2))
    got = TorchGQA().paged(q, k_cache, v_cache, queries, 0.5, None)
    wide = TorchGQA().paged(q.float(), k_cache.float(), v_cache.float(), queries, 0.5, None)
    assert torch.equal(got, wide.bfloat16())


@pytest.mark.usefixtures("block")
def test_trees() -> None:
    plain, size = paged_queries(LENS)
    queries, trees = random_trees(plain)
    q = normal(9, 4, 12, dtype=FP32)
    cache, v_cache = (filled_cache(queries, size, 2, 12, dtype=FP32) for _ in range(2))
    latent = TorchMLA().absorbed(q, cache[:, 0], queries, 0.3, None, value_width=10)
    close(latent, absorbed_attention(q, cache[:, 0], queries, 0.3, 10, trees))
    mixed = TorchGQA().paged(q, cache, v_cache, queries, 0.3, None)
    close(mixed, grouped_attention(q, cache, v_cache, queries, 0.3, trees))


def test_a_tree_has_at_most_64_tokens_and_no_expanded_form() -> None:
    plain, size = paged_queries(LENS)
    queries, _ = random_trees(plain)
    with pytest.raises(ValueError, match="gathered"):
        TorchMLA().gather_latent(torch.zeros(size, 12), queries, None)
    with pytest.raises(ValueError, match="expanded"):
        TorchMLA().expanded(torch.zeros(9, 2, 12), torch.zeros(23, 2, 16), torch.zeros(23, 4), queries, 1.0, None)
    with pytest.raises(ValueError, match="64 query tokens"):
        replace(queries, query_lens=[65], visible=torch.ones(65, dtype=torch.int64))
    with pytest.raises(ValueError, match="int64"):
        replace(queries, visible=torch.ones(9, dtype=torch.int32))
