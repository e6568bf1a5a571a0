"""MLA in the absorbed form, under the interpreter, against float64: NaN in every slot without an owner."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_engine.kernels import tables
from moe_engine.kernels.attention.schedule import ScheduleBuffers
from moe_engine.kernels.device import Device, Need
from moe_engine.kernels.kv_format import latent_records
from moe_engine.kernels.kv_format.formats import FP8_GROUPS, FP8_RANGE, FP8_TENSOR, FP8_TOKEN
from moe_engine.kernels.queries import AttentionBatch
from moe_engine.kernels.registry import select
from tests.kernels.cpu.formulas import (
    absorbed_attention,
    close,
    filled_cache,
    normal,
    only,
    paged_queries,
    random_trees,
    slots_of,
)
from tests.kernels.triton.memory_check import checked_accesses

pytestmark = pytest.mark.drawn(12)

triton_attention = pytest.importorskip("moe_engine.kernels.attention.triton.attention", reason="needs triton")
TritonMLA = triton_attention.TritonMLA

LENS = [(1, 1), (1, 70), (0, 9), (3, 3), (1, 130), (5, 61), (2, 64)]
ROTARY = 64
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("heads", "latent", "page_size", "dtype"),
    [(16, 512, 64, BF16), (3, 40, 1, BF16), (12, 64, 16, BF16), (128, 96, 8, BF16), (3, 40, 4, FP32)],
)
def test_absorbed(heads: int, latent: int, page_size: int, dtype: torch.dtype) -> None:
    """Relative to the largest value: 1.2e-2 in bf16 (weights and output are rounded), 6e-6 in fp32."""
    mla = TritonMLA(num_programs=7)
    queries, size = paged_queries(LENS if heads < 16 else LENS[:4], page_size)
    cache = filled_cache(queries, size, latent + ROTARY, dtype=dtype)
    q = normal(queries.num_tokens, heads, latent + ROTARY, dtype=dtype)
    scale = 0.7 * (latent + ROTARY) ** -0.5
    got = mla.absorbed(q, cache, queries, scale, mla.plan(AttentionBatch(queries, None)))
    close(got, absorbed_attention(q, cache, queries, scale, latent), 2)
    again = mla.absorbed(q, cache, queries, scale, mla.plan(AttentionBatch(queries, None)))  # planned before the call
    assert torch.equal(again, got)


def test_other_widths_and_strided_queries() -> None:
    mla = TritonMLA()
    queries, size = paged_queries([(2, 90), (1, 5)])
    cache = filled_cache(queries, size, 33, dtype=FP32)
    q = normal(3, 2, 50, dtype=FP32)[..., 11:44]
    close(mla.absorbed(q, cache, queries, 0.2, None, value_width=27), absorbed_attention(q, cache, queries, 0.2, 27), 2)
    wide = normal(4, 6, 33, dtype=FP32)[1:, 2:4]  # a token's heads are a part of all
    close(
        mla.absorbed(wide, cache, queries, 0.2, None, value_width=27),
        absorbed_attention(wide, cache, queries, 0.2, 27),
        2,
    )


@pytest.mark.parametrize(("form", "limit"), [(FP8_TOKEN, 2), (FP8_GROUPS, 2)])
@pytest.mark.parametrize(("latent", "heads"), [(128, 5), (512, 40)])
def test_fp8_records(form: int, limit: float, latent: int, heads: int) -> None:
    """Compared with the values of the records, not with the original numbers: the cast is not part of the kernel."""
    mla = TritonMLA(num_programs=3)
    queries, size = paged_queries([(1, 130), (2, 40)], 16)
    rows = normal(size, latent + ROTARY, dtype=BF16)
    rows[:, latent:] *= 20
    records = latent_records.pack(rows, latent, form)
    assert records.shape[1] == latent_records.record_bytes(form, latent, ROTARY)
    assert latent_records.form_of(records, latent, ROTARY) == form
    numbers = latent_records.unpack(records, latent, ROTARY)
    assert ((numbers - rows).abs() <= 0.07 * rows.abs() + 0.02).all()
    mine = torch.cat([slots_of(queries, r) for r in range(2)])
    poisoned = torch.full_like(records, 0xFF)  # NaN in e4m3, bf16 and float32
    poisoned[mine] = records[mine]
    q = normal(3, heads, latent + ROTARY, dtype=BF16)
    got = mla.absorbed(q, poisoned, queries, 0.02, None)
    close(got, absorbed_attention(q, numbers, queries, 0.02, latent), limit)
    context = mla.gather_latent(poisoned, queries, None)
    assert torch.equal(context, numbers[mine].to(BF16))


@pytest.mark.parametrize(
    ("form", "latent", "rotary", "heads"),
    [(FP8_RANGE, 128, 64, 5), (FP8_RANGE, 40, 12, 5), (FP8_TOKEN, 40, 12, 5), (FP8_TENSOR, 40, 12, 5),
     (FP8_TENSOR, 512, 64, 40)],
)  # fmt: skip
def test_fp8_rows_of_other_widths(form: int, latent: int, rotary: int, heads: int) -> None:
    mla = TritonMLA(num_programs=3)
    queries, size = paged_queries([(1, 130), (2, 40)], 4)
    rows = latent_records.pack(normal(size, latent + rotary, dtype=FP32), latent, form)
    numbers = latent_records.unpack(rows, latent, rotary)
    mine = torch.cat([slots_of(queries, r) for r in range(2)])
    raw = torch.full_like(rows.view(torch.uint8), 0xFF)
    raw[mine] = rows.view(torch.uint8)[mine]
    cache, q = raw.view(rows.dtype), normal(3, heads, latent + rotary, dtype=BF16)
    close(mla.absorbed(q, cache, queries, 0.1, None, latent), absorbed_attention(q, numbers, queries, 0.1, latent), 2)
    out = torch.empty(len(mine), latent + rotary)
    assert torch.equal(mla.gather_latent(cache, queries, None, out, latent), numbers[mine])


@pytest.mark.parametrize(
    ("heads", "dtype", "lens"), [(1, FP32, [(1, 1), (64, 64), (5, 45)]), (128, BF16, [(1, 20), (3, 40)])]
)
def test_trees(heads: int, dtype: torch.dtype, lens: list) -> None:
    mla = TritonMLA(num_programs=5)
    queries, size = paged_queries(lens, 16)
    queries, trees = random_trees(queries)
    cache = filled_cache(queries, size, 96, dtype=dtype)
    q = normal(queries.num_tokens, heads, 96, dtype=dtype)
    got = mla.absorbed(q, cache, queries, 0.1, mla.plan(AttentionBatch(queries, None)))
    close(got, absorbed_attention(q, cache, queries, 0.1, 32, trees), 2)


def test_deterministic_bits_depend_on_the_request_alone() -> None:
    need = Need("bfloat16", deterministic=True)
    choice = select("attention", tables.MLA, "auto", Device("cuda", "GPU", (9, 0)), need)
    mla = choice.build()  # as built with --enable-deterministic-inference
    lens = [(1, 700), (4, 560), (1, 3), (2, 1100)]
    queries, size = paged_queries(lens, 16)
    cache = filled_cache(queries, size, 96, dtype=BF16)
    q = normal(queries.num_tokens, 4, 96, dtype=BF16)
    whole = mla.absorbed(q, cache, queries, 0.1, mla.plan(AttentionBatch(queries, None))).split(queries.query_lens)
    for request, mine in enumerate(q.split(queries.query_lens)):
        assert torch.equal(mla.absorbed(mine, cache, only(queries, request), 0.1, None), whole[request])
        first = slice(0, 1)
        alone = mla.absorbed(mine[first], cache, only(queries, request, first), 0.1, None)
        assert torch.equal(alone, whole[request][first])
    close(torch.cat(whole), absorbed_attention(q, cache, queries, 0.1, 32), 2)


def test_plans_in_fixed_buffers() -> None:
    """Two steps through the same memory: grids are the buffers' size, addresses never change."""
    mla = TritonMLA(num_programs=4)
    buffers = ScheduleBuffers(24, 8, 16, torch.device("cpu"))
    pointers = set()
    for lens in ([(1, 260), (1, 33)], [(1, 7), (1, 120), (1, 64)]):
        queries, size = paged_queries(lens, 8)
        cache = filled_cache(queries, size, 96, dtype=FP32)
        q = normal(queries.num_tokens, 3, 96, dtype=FP32)
        plan = mla.plan(AttentionBatch(queries, None), buffers)
        close(mla.absorbed(q, cache, queries, 0.1, plan), absorbed_attention(q, cache, queries, 0.1, 32), 2)
        (made,) = plan.of(queries)._schedules.values()
        pointers.add((made.segments.data_ptr(), made.merges.data_ptr(), len(made.segments), len(made.merges)))
    assert len(pointers) == 1
    with pytest.raises(ValueError, match="exceeds"):
        queries, _ = paged_queries([(1, 40)] * 30)
        mla.plan(AttentionBatch(queries, None), buffers)


@pytest.mark.parametrize(("count", "heads"), [(1, 18), (3, 5)])
def test_plans_in_place_follow_the_queries(count: int, heads: int) -> None:
    """As in replays of a graph: one plan, renewed in its memory with upper bounds of lengths that only the device has.
    It serves other queries of the same size."""
    mla = TritonMLA(num_programs=5)
    queries, size = paged_queries([(count, 70)] * 4, 8)
    assert mla.capabilities.plan_in_place(AttentionBatch(queries, None)) is None  # before the first run
    cache = filled_cache(queries, size, 96, dtype=FP32)
    q = normal(queries.num_tokens, heads, 96, dtype=FP32)
    mla.absorbed(q, cache, queries, 0.1, mla.plan(AttentionBatch(queries, None)))
    plan = mla.plan_in_place(AttentionBatch(queries, None))
    assert plan is not None and plan.on_device
    pointers, bounds = set(), ([70, 70, 27, 66], [count] * 4, [70] * 4)
    for lens, most in zip(([70, count, 7, 64], [count] * 4, [count, 49, 33, 5]), bounds):
        fresh, size = paged_queries([(count, length) for length in lens], 8)
        cache = filled_cache(fresh, size, 96, dtype=FP32)
        queries.context_lens[:] = most
        queries.context_lens_device.copy_(fresh.context_lens_device)
        queries.rows.copy_(fresh.rows)
        queries.slot_table[:, : fresh.slot_table.shape[1]].copy_(fresh.slot_table)
        plan.renew()
        close(mla.absorbed(q, cache, replace(queries), 0.1, plan), absorbed_attention(q, cache, fresh, 0.1, 32), 2)
        (made,) = plan._schedules.values()
        pointers.add((made.segments.data_ptr(), made.merges.data_ptr(), len(made.segments), made.num_partials))
    assert len(pointers) == 1


def test_no_plan_in_place_with_fixed_cuts() -> None:
    mla = TritonMLA(deterministic=True, num_programs=5)
    queries, size = paged_queries([(1, 40)], 8)
    cache = filled_cache(queries, size, 96, dtype=FP32)
    mla.absorbed(normal(1, 3, 96, dtype=FP32), cache, queries, 0.1, None)
    assert mla.plan_in_place(AttentionBatch(queries, None)) is None


def test_gather() -> None:
    mla = TritonMLA()
    queries, size = paged_queries(LENS, 16)
    cache = filled_cache(queries, size, 72, dtype=BF16)
    expected = torch.cat([cache[slots_of(queries, r)] for r in range(len(LENS))])
    assert torch.equal(mla.gather_latent(cache, queries, None), expected)


def test_nothing_to_do_and_what_is_refused() -> None:
    mla = TritonMLA()
    queries, _ = paged_queries([])
    q, cache = torch.empty(0, 4, 96), torch.empty(8, 96)
    assert mla.absorbed(q, cache, queries, 1.0, mla.plan(AttentionBatch(queries, None))).shape == (0, 4, 32)
    assert mla.gather_latent(cache, queries, None).shape == (0, 96)
    kv, rope = torch.empty(0, 4, 64), torch.empty(0, 64)
    assert mla.expanded(q, kv, rope, queries, 1.0, None).shape == (0, 4, 32)
    queries, size = paged_queries([(3, 9)])
    with pytest.raises(ValueError, match="bytes"):
        mla.absorbed(torch.zeros(3, 4, 96), torch.zeros(size, 97, dtype=torch.uint8), queries, 1.0, None)
    with pytest.raises(ValueError, match="values"):
        mla.absorbed(torch.zeros(3, 4, 96), torch.zeros(size, 97), queries, 1.0, None)
    with pytest.raises(ValueError, match="cache is"):
        mla.absorbed(torch.zeros(3, 4, 96), torch.zeros(size, 96, dtype=BF16), queries, 1.0, None)
    tree, _ = random_trees(queries)
    with pytest.raises(ValueError, match="gathered"):
        mla.gather_latent(torch.zeros(size, 96), tree, None)


def test_large_scores_do_not_overflow() -> None:
    mla = TritonMLA(num_programs=6)
    queries, size = paged_queries([(2, 700)])
    cache = filled_cache(queries, size, 128, dtype=BF16)
    q = normal(2, 16, 128, dtype=BF16, scale=60.0)
    close(mla.absorbed(q, cache, queries, 1.0, None), absorbed_attention(q, cache, queries, 1.0, 64), 4)


@pytest.mark.parametrize(
    ("heads", "latent", "value", "dtype", "lens"),
    [
        (16, 512, 128, BF16, [(1, 300), (1, 1), (1, 130)]),
        (3, 40, 20, FP32, [(1, 70), (2, 90), (1, 5)]),
        (12, 64, 33, BF16, [(3, 61), (4, 200)]),
        (128, 96, 16, BF16, [(2, 70)]),
    ],
)
@pytest.mark.parametrize("programs", [1, 7])
def test_values_of_few_tokens(heads, latent, value, dtype, lens, programs) -> None:
    """The merge and the product by W_UV in one launch, of contexts that are split and of others."""
    mla = TritonMLA(num_programs=programs)
    queries, size = paged_queries(lens, 4)
    cache = filled_cache(queries, size, latent + ROTARY, dtype=dtype)
    q = normal(queries.num_tokens, heads, latent + ROTARY, dtype=dtype)
    weight = normal(heads, value, latent, dtype=dtype)
    scale = 0.7 * (latent + ROTARY) ** -0.5
    values = mla.capabilities.absorbed_values
    assert values is not None and queries.num_tokens <= values.max_tokens
    got = values.run(q, cache, queries, scale, mla.plan(AttentionBatch(queries, None)), weight)
    mixed = absorbed_attention(q, cache, queries, scale, latent)
    close(got, torch.einsum("thc,hvc->thv", mixed, weight.double()), 2)


def test_one_share_of_a_block_writes_its_sums() -> None:
    """Shares add the parts of a score in another order: the last one to write would decide about the bits."""
    mla = TritonMLA(num_programs=7)
    queries, size = paged_queries([(3, 61), (4, 200)], 4)
    cache, q = filled_cache(queries, size, 64 + ROTARY, dtype=BF16), normal(7, 12, 64 + ROTARY, dtype=BF16)
    plan = mla.plan(AttentionBatch(queries, None))
    with checked_accesses():
        got = mla.absorbed(q, cache, queries, 0.1, plan)
    close(got, absorbed_attention(q, cache, queries, 0.1, 64), 2)


def test_values_of_a_captured_step() -> None:
    """The schedule has room for other lengths; a context that is shorter than planned has empty pieces."""
    mla = TritonMLA(num_programs=6)
    queries, size = paged_queries([(1, 300), (1, 90)])
    cache = filled_cache(queries, size, 96, dtype=BF16)
    q, weight = normal(2, 4, 96, dtype=BF16), normal(4, 24, 32, dtype=BF16)
    mla.absorbed(q, cache, queries, 0.1, None, 32)
    plan = mla.plan_in_place(AttentionBatch(queries, None))
    shorter = replace(queries, context_lens=[170, 90], context_lens_device=torch.tensor([170, 90], dtype=torch.int32))
    values = mla.capabilities.absorbed_values
    assert values is not None
    for mine in (queries, shorter):
        got = values.run(q, cache, mine, 0.1, plan, weight)
        close(got, torch.einsum("thc,hvc->thv", absorbed_attention(q, cache, mine, 0.1, 32), weight.double()), 2)


def test_values_that_do_not_fit() -> None:
    mla = TritonMLA()
    queries, size = paged_queries([(1, 5)])
    cache, q = filled_cache(queries, size, 96, dtype=BF16), normal(1, 4, 96, dtype=BF16)
    values = mla.capabilities.absorbed_values
    assert values is not None
    with pytest.raises(ValueError, match="do not fit"):
        values.run(q, cache, queries, 0.1, None, normal(3, 24, 32, dtype=BF16))
    assert TritonMLA(deterministic=True).capabilities.absorbed_values is None
