"""Contexts that the vendor rows expand in parts, with emulators: against float64, and refusals."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.attention import parts
from moe_engine.kernels.attention.parts import chunk_lens, merge_chunks
from moe_engine.kernels.attention.reference import TorchMLA
from moe_engine.kernels.attention.vendors.fa3 import FA3MLA
from moe_engine.kernels.attention.vendors.flashinfer_mla import FlashInferMLA, _Expanded
from moe_engine.kernels.attention.vendors.flashmla import FlashMLA
from moe_engine.kernels.kv_format.latent_records import FP8_GROUPS, pack
from moe_engine.kernels.queries import PagedQueries
from tests.kernels.cpu.formulas import close, filled_cache, normal, only, paged_queries, random_trees, slots_of
from tests.kernels.vendors import fa3_emulator, flash_mla_emulator, flashinfer_emulator

BF16, NOPE, ROTARY, VALUE, LATENT, SCALE = torch.bfloat16, 128, 64, 128, 512, 192**-0.5
MLA = {
    "torch": TorchMLA,
    "flashinfer": lambda: FlashInferMLA(flashinfer_emulator.module()),
    "fa3": lambda: FA3MLA(fa3_emulator.module()),
    "fa3 of the wheel": lambda: FA3MLA(fa3_emulator.module(wheel=True)),
    "flashmla": lambda: FlashMLA(flash_mla_emulator.module(), expanded=FA3MLA(fa3_emulator.module())),
}


def expected(q: Tensor, kv: Tensor, rope: Tensor, queries: PagedQueries) -> tuple[Tensor, Tensor]:
    """(out, natural log-sum-exp) of whole contexts, float64."""
    found, starts = [], [0, *torch.tensor(queries.context_lens).cumsum(0).tolist()]
    token = 0
    for begin, context, count in zip(starts, queries.context_lens, queries.query_lens):
        k = torch.cat((kv[..., :NOPE], rope[:, None].expand(-1, kv.shape[1], -1)), -1)[begin : begin + context].double()
        scores = torch.einsum("thd,shd->ths", q[token : token + count].double(), k) * SCALE
        hidden = torch.arange(context)[None, :] > torch.arange(context - count, context)[:, None]
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        values = kv[begin : begin + context, :, NOPE:].double()
        found.append((torch.einsum("ths,shv->thv", scores.softmax(-1), values), scores.logsumexp(-1)))
        token += count
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


def rounds(queries: PagedQueries, last: list[int]) -> list[tuple[list[int], list[int], list[int]]]:
    """(requests, first keys, key lengths): first the last tokens of every context, with a causal mask, then the tokens
    before these, in unequal parts of one request."""
    firsts = [context - count for context, count in zip(queries.context_lens, last)]
    found = [(list(range(len(last))), firsts, last)]
    for i, left in enumerate(firsts):
        for size in (1, 11, left):
            size = min(size, left)
            left -= size
            if size:
                found.append(([i], [left], [size]))
    return found


@pytest.mark.parametrize("name", MLA)
@pytest.mark.parametrize(
    "lens,last",
    [
        ([(5, 41)], [9]),
        ([(7, 7), (1, 30), (13, 64)], [7, 2, 50]),  # one has no tokens before its query tokens
        ([(16, 33), (3, 18)], [16, 3]),
    ],
)
def test_parts_equal_float64(name: str, lens: list[tuple[int, int]], last: list[int]) -> None:
    """Several requests in one part, and parts that end inside a page; twice, as in two layers."""
    backend: Any = MLA[name]()
    queries, size = paged_queries(lens, 64)
    cache, heads = filled_cache(queries, size, LATENT + ROTARY, dtype=BF16), 3
    slots = [slots_of(queries, i) for i in range(len(lens))]
    kv_of = normal(size, heads, NOPE + VALUE, dtype=BF16)  # expansion of a slot's latent
    q, every = normal(queries.num_tokens, heads, NOPE + ROTARY, dtype=BF16), torch.cat(slots)
    want, want_lse = expected(q, kv_of[every], cache[every, LATENT:], queries)
    planned = []
    for live, firsts, counts in rounds(queries, last):
        asked = queries if len(live) == len(lens) else only(queries, live[0])
        planned.append((live, firsts, counts, asked, backend.plan_chunk(asked, firsts, counts)))
    for _ in range(2):
        out, lse = torch.empty(0), torch.empty(0)
        for live, firsts, counts, asked, plan in planned:
            rows = torch.cat([slots[i][first : first + count] for i, first, count in zip(live, firsts, counts)])
            latent = q.new_empty(len(rows), LATENT + ROTARY)
            assert torch.equal(backend.gather_latent(cache, asked, plan, latent, LATENT), cache[rows])
            start = sum(queries.query_lens[: live[0]])
            tokens = slice(start, start + asked.num_tokens)
            part = backend.expanded_chunk(q[tokens], kv_of[rows], latent[:, LATENT:], SCALE, plan)
            assert part[0].is_contiguous() and part[1].is_contiguous() and part[1].dtype == torch.float32
            if out.numel():
                backend.merge_chunks(out[tokens], lse[tokens], *part)
            else:
                out, lse = part
        close(out, want, 2)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MLA)
def test_parts_that_no_single_mask_does_are_refused(name: str) -> None:
    backend: Any = MLA[name]()
    queries, _ = paged_queries([(5, 20), (3, 9)])
    backend.plan_chunk(queries, [15, 2], [5, 7])
    backend.plan_chunk(queries, [3, 0], [12, 6])
    for firsts, lens in (
        ([15, 0], [5, 6]),  # one with its query tokens, one before them
        ([10, 0], [9, 6]),  # ends among the query tokens
        ([16, 2], [4, 7]),  # begins among them
        ([3, 0], [12, 0]),  # no keys
        ([-1, 0], [12, 6]),
    ):
        with pytest.raises(ValueError, match="chunk"):
            backend.plan_chunk(queries, firsts, lens)
    with pytest.raises(ValueError, match="causal"):
        backend.plan_chunk(random_trees(queries)[0], [15, 2], [5, 7])


def test_lengths_of_parts() -> None:
    assert chunk_lens(16385, 8192, 8192) == [4096, 4097, 8192]
    draw = random.Random(0)
    for _ in range(2000):
        size = draw.randint(1, 40)
        context = size + draw.randint(1, 400)
        count = draw.randint(1, size)
        lens = chunk_lens(context, count, size)
        assert sum(lens) == context and min(lens) >= 1 and max(lens) <= size and lens[-1] >= count
        assert len(lens) == -(-context // size) and len(set(lens[1:-1])) <= 1


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_merging_a_block_at_a_time(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The float64 sum of two parts, also with very different weights."""
    monkeypatch.setattr(parts, "MAX_MERGED", 70)
    out, other = normal(11, 2, 16, dtype=dtype), normal(11, 2, 16, dtype=dtype)
    lse, other_lse = (torch.randn(11, 2) * 30 for _ in "ab")
    total = torch.logaddexp(lse.double(), other_lse.double())
    shares = (x.double().sub(total).exp()[..., None] for x in (lse, other_lse))
    want = sum(x.double() * share for x, share in zip((out, other), shares))
    merge_chunks(out, lse, other, other_lse)
    close(out, want)
    torch.testing.assert_close(lse.double(), total, rtol=1e-6, atol=1e-6)


def test_parts_of_one_length_share_a_plan_of_flashinfer() -> None:
    """Later steps plan the parts in advance."""
    module = flashinfer_emulator.module()
    wrapper = module.BatchPrefillWithRaggedKVCacheWrapper
    backend = FlashInferMLA(module)
    queries, size = paged_queries([(6, 86)])
    cache = filled_cache(queries, size, LATENT + ROTARY, dtype=BF16)
    q, kv = normal(6, 2, NOPE + ROTARY, dtype=BF16), normal(86, 2, NOPE + VALUE, dtype=BF16)
    for step in range(3):
        wrapper.made = 0 if step == 0 else wrapper.made
        begin, plans = 0, []
        for length in (20, 20, 20, 20, 6):
            plans.append((begin, length, backend.plan_chunk(queries, [begin], [length])))
            begin += length
        before = wrapper.made
        for begin, length, plan in plans:
            rows = slots_of(queries, 0)[begin : begin + length]
            backend.expanded_chunk(q, kv[begin : begin + length], cache[rows, LATENT:], SCALE, plan)
        assert wrapper.made == (2 if step == 0 else before), "planned at the layer"
    assert wrapper.made <= 6


def test_parts_of_fp8_records_are_unpacked() -> None:
    backend = FlashMLA(flash_mla_emulator.module(), expanded=TorchMLA())
    queries, size = paged_queries([(3, 90), (5, 7)], 64)
    records = torch.full((size, 656), 255, dtype=torch.uint8)  # NaN wherever it is read
    for i in range(2):
        records[slots_of(queries, i)] = pack(normal(queries.context_lens[i], 576, dtype=BF16), LATENT, FP8_GROUPS)
    out = torch.empty(40 + 6, 576, dtype=BF16)
    backend.gather_latent(records, queries, backend.plan_chunk(queries, [50, 1], [40, 6]), out, LATENT)
    rows = torch.cat((slots_of(queries, 0)[50:], slots_of(queries, 1)[1:]))
    close(out, flash_mla_emulator.unpack(records[rows]))


def test_plans_of_flashinfer_are_small_where_they_fit() -> None:
    """The emulator counts Hopper's lists: it refuses a plan that does not fit."""
    module = flashinfer_emulator.module()
    sizes = []

    class Noting(module.BatchPrefillWithRaggedKVCacheWrapper):
        def plan(self, *args: Any, **options: Any) -> None:
            sizes.append(self._plan_bytes)
            super().plan(*args, **options)

    module.BatchPrefillWithRaggedKVCacheWrapper = Noting
    backend = FlashInferMLA(module)
    kept = []
    for heads, lens in ((128, [(8192, 8192)]), (128, [(1, 1)] * 300), (16, [(100, 100)] * 163), (256, [(9000, 9000)])):
        queries, _ = paged_queries(lens, 64)
        form = _Expanded(heads, 192, 128, SCALE, BF16)
        kept.append(backend._new_ragged(queries, queries.context_lens, True, form))
    assert sizes == [1 << 20, 8 << 20, 1 << 20, 1 << 20]


@pytest.mark.parametrize("name", MLA)
def test_every_row_that_a_gpu_may_have_expands_in_parts(name: str) -> None:
    assert MLA[name]().capabilities.chunks is not None
