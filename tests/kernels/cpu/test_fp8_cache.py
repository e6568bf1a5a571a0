"""FP8 rows of a KV cache in C++: the bytes that the torch row writes, and attention over exactly their values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.attention.cpu import CpuGQA, CpuMLA
from moe_engine.kernels.attention.reference import TorchGQA, TorchMLA
from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.kv_format import head_records, latent_records
from moe_engine.kernels.kv_format.formats import (
    E4M3,
    E4M3_TENSOR,
    E5M2,
    FP8_GROUPS,
    FP8_RANGE,
    FP8_TENSOR,
    FP8_TOKEN,
    STORED,
)
from moe_engine.kernels.ops.cpu import CpuOps
from moe_engine.kernels.ops.reference import TorchOps
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from tests.kernels.cpu.formulas import (
    close,
    drawn_scale,
    normal,
    only,
    paged_queries,
    random_trees,
    rotary_table,
    slots_of,
)

LENS = [(1, 1), (1, 70), (3, 3), (1, 600), (5, 131), (16, 1100)]
LATENTS = [(FP8_GROUPS, 512, 64), (FP8_TOKEN, 40, 6), (FP8_RANGE, 72, 16), (FP8_TENSOR, 72, 16)]
HEADS = [(FP8_TOKEN, 64), (FP8_TOKEN, 33), (FP8_RANGE, 80)]
SCORES = 6.0
"""Scores up to 25, a fifth of the sum of 576 products in float32, differ by up to 1.5e-5, and weights as much."""
EXTREMES = torch.tensor([0.0, -0.0, 1e-30, 448.0, 464.0, 1e9, -3e4, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 2.0**-17, 57344.0])


def _filled(queries: PagedQueries, size: int, pack: Callable[[Tensor], Tensor], *shape: int) -> Tensor:
    """Records of random numbers in the slots that belong to a request, NaN in all others."""
    cache = pack(torch.full((size, *shape), float("nan")))
    cache.view(torch.uint8)[:] = 0x7F
    for request in range(queries.num_requests):
        slots = slots_of(queries, request)
        cache.view(torch.uint8)[slots] = pack(torch.randn(len(slots), *shape)).view(torch.uint8)
    return cache


@pytest.mark.parametrize(("form", "latent", "rotary"), LATENTS)
@pytest.mark.parametrize("interleaved", [True, False])
def test_latent_rows_are_the_reference_rows(
    any_library: Library, dtype: torch.dtype, form: int, latent: int, rotary: int, interleaved: bool
) -> None:
    kv_a, weight = normal(9, latent + rotary, dtype=dtype, scale=3.0), torch.rand(latent) * 0.1 + 0.01
    scale = drawn_scale() / 8 if form == FP8_TENSOR else 1.0
    kv_a[3, : len(EXTREMES)] = EXTREMES.to(dtype)
    kv_a[4] = 0
    table, positions, slots = rotary_table(50, rotary, interleaved), torch.randint(50, (9,)), torch.randperm(30)[:9]
    width = latent_records.pack(torch.zeros(1, latent + rotary), latent, form).shape[1]
    stored = {FP8_RANGE: torch.float8_e5m2, FP8_TENSOR: torch.float8_e4m3fn}.get(form, torch.uint8)
    got, want = (torch.zeros(30, width, dtype=stored) for _ in range(2))
    for ops, cache in ((CpuOps(any_library), got), (TorchOps(), want)):
        ops.write_latent(kv_a, weight, 1e-6, positions, table, slots, cache, scale)
    # norm and rotation may round differently in the last bit, which sometimes changes the value of eight bits
    numbers = [latent_records.unpack(cache, latent, rotary) for cache in (got, want)]
    assert (got.view(torch.uint8) != want.view(torch.uint8)).float().mean() < 0.02
    assert torch.equal(got.view(torch.uint8).any(1), want.view(torch.uint8).any(1))
    torch.testing.assert_close(*numbers, rtol=0.26 if form == FP8_RANGE else 0.13, atol=1e-4)


@pytest.mark.parametrize(("form", "width"), HEADS)
def test_heads_are_the_reference_rows(any_library: Library, dtype: torch.dtype, form: int, width: int) -> None:
    qkv = normal(7, 5, width, dtype=dtype, scale=2.0)
    qkv[2, 1, : len(EXTREMES)] = EXTREMES.to(dtype)
    qkv[3, 2] = 0
    qkv[4, 3, 5] = float("nan")
    k, v, slots = qkv[:, :2], qkv[:, 2:4], torch.randperm(20)[:7].int()
    empty = head_records.pack(torch.zeros(20, 2, width), form)
    got, want = [empty.clone(), empty.clone()], [empty.clone(), empty.clone()]
    CpuOps(any_library).write_kv(k, v, slots, *got)
    TorchOps().write_kv(k, v, slots, *want)
    for mine, theirs in zip(got, want):
        ours, expected = head_records.unpack(mine, width), head_records.unpack(theirs, width)
        clean = ~expected.isnan().any(-1)
        assert torch.equal(mine.view(torch.uint8)[clean], theirs.view(torch.uint8)[clean])
        assert ours[~clean].isnan().any(-1).all()


@pytest.mark.parametrize(("form", "latent", "rotary"), LATENTS)
def test_mla_reads_what_the_rows_say(
    any_library: Library, dtype: torch.dtype, form: int, latent: int, rotary: int
) -> None:
    queries, size = paged_queries(LENS, 4)
    cache = _filled(queries, size, lambda rows: latent_records.pack(rows, latent, form), latent + rotary)
    mla, q = CpuMLA(any_library), normal(queries.num_tokens, 5, latent + rotary, dtype=dtype)
    plan = mla.plan(AttentionBatch(queries, None))
    got = mla.absorbed(q, cache, queries, 0.2, plan, latent)
    # the C++ kernels multiply rows of q's dtype, the reference those of float32
    scale = SCORES if dtype == torch.float32 else 2.5
    close(got, TorchMLA().absorbed(q.float(), cache, queries, 0.2, None, latent).double(), scale)
    out = torch.empty(queries.num_context_tokens, latent + rotary, dtype=dtype)
    assert mla.gather_latent(cache, queries, plan, out, latent) is out
    assert torch.equal(out, TorchMLA().gather_latent(cache, queries, None, torch.empty_like(out), latent))


@pytest.mark.parametrize("value", [0, 16])
@pytest.mark.parametrize(("form", "width"), HEADS)
def test_gqa_reads_what_the_rows_say(
    any_library: Library, dtype: torch.dtype, form: int, width: int, value: int
) -> None:
    """`value`: channels of a value; 0: as of a key."""
    queries, size = paged_queries(LENS, 16)
    widths = (width, value or width)
    keys, values = (_filled(queries, size, lambda x: head_records.pack(x, form), 2, each) for each in widths)
    for heads in (2, 24):
        q = normal(queries.num_tokens, heads, width, dtype=dtype)
        got = CpuGQA(any_library).paged(q, keys, values, queries, 0.2, None)
        close(got, TorchGQA().paged(q.float(), keys, values, queries, 0.2, None).double(), 2.5)


@pytest.mark.parametrize(("form", "latent", "rotary"), LATENTS)
def test_bits_do_not_depend_on_the_batch_and_trees_are_seen(
    library: Library, form: int, latent: int, rotary: int
) -> None:
    queries, size = paged_queries(LENS)
    cache = _filled(queries, size, lambda rows: latent_records.pack(rows, latent, form), latent + rotary)
    mla, q = CpuMLA(library), torch.randn(queries.num_tokens, 5, latent + rotary)
    together = mla.absorbed(q, cache, queries, 0.2, None, latent).split(queries.query_lens)
    for request, mine in enumerate(q.split(queries.query_lens)):
        alone = mla.absorbed(mine, cache, only(queries, request), 0.2, None, latent)
        assert torch.equal(alone, together[request])
    tree, _ = random_trees(queries)
    want = TorchMLA().absorbed(q, cache, tree, 0.2, None, latent)
    close(mla.absorbed(q, cache, tree, 0.2, None, latent), want.double(), SCORES)


def test_rows_of_other_widths_are_refused(library: Library) -> None:
    queries, size = paged_queries([(1, 4)])
    with pytest.raises(ValueError, match="no FP8 record"):
        CpuMLA(library).absorbed(torch.zeros(1, 2, 80), torch.zeros(size, 80, dtype=torch.uint8), queries, 1.0, None)
    with pytest.raises(ValueError, match="a head of 16 20"):
        caches = [torch.zeros(size, 1, 16, dtype=torch.uint8)] * 2
        CpuGQA(library).paged(torch.zeros(1, 2, 16), *caches, queries, 1.0, None)
    with pytest.raises(ValueError, match="float64"):
        CpuMLA(library).absorbed(torch.zeros(1, 2, 80), torch.zeros(size, 80).double(), queries, 1.0, None)
    assert {STORED[name][1] for name in (E4M3, E5M2, E4M3_TENSOR)} == {1}
