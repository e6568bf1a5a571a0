"""Grouped-query attention, under the interpreter, against float64: NaN in every slot without an owner."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_engine.kernels import tables
from moe_engine.kernels.device import Device, Need
from moe_engine.kernels.kv_format import head_records
from moe_engine.kernels.kv_format.formats import FP8_RANGE, FP8_TOKEN
from moe_engine.kernels.queries import AttentionBatch
from moe_engine.kernels.registry import Choice, Row, select
from tests.kernels.cpu.formulas import (
    close,
    filled_cache,
    grouped_attention,
    normal,
    only,
    paged_queries,
    random_trees,
    slots_of,
)

triton_attention = pytest.importorskip("moe_engine.kernels.attention.triton.attention", reason="needs triton")
TritonGQA = triton_attention.TritonGQA

DECODE = [(1, 1), (1, 70), (0, 5), (1, 300), (3, 131)]
PREFILL = [(40, 40), (70, 190), (1, 65), (33, 33)]
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.each_value
@pytest.mark.parametrize("lens", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("heads", "groups", "width", "value", "page_size", "dtype"),
    [
        (8, 2, 64, 64, 16, BF16), (6, 6, 80, 80, 1, BF16), (4, 1, 128, 128, 64, BF16), (3, 1, 33, 33, 8, FP32),
        (8, 4, 64, 64, 1, FP32), (8, 1, 192, 128, 16, BF16), (4, 2, 24, 40, 1, FP32),
    ],
)  # fmt: skip
def test_paged(heads: int, groups: int, width: int, value: int, page_size: int, dtype: torch.dtype, lens: list) -> None:
    """Relative to the largest value: 1.2e-2 in bf16 (weights and output are rounded), 6e-6 in fp32."""
    gqa = TritonGQA(num_programs=9)
    queries, size = paged_queries(lens, page_size)
    keys, values = (filled_cache(queries, size, groups, channels, dtype=dtype) for channels in (width, value))
    q = normal(queries.num_tokens, heads + 1, width, dtype=dtype)[:, 1:]  # a slice of the layer's joint product
    scale = width**-0.5
    got = gqa.paged(q, keys, values, queries, scale, gqa.plan(AttentionBatch(queries, None)))
    close(got, grouped_attention(q, keys, values, queries, scale), 2)


@pytest.mark.parametrize("form", [FP8_TOKEN, FP8_RANGE])
@pytest.mark.parametrize(
    ("heads", "width", "value", "dtype"), [(6, 80, 80, BF16), (2, 33, 33, FP32), (4, 24, 16, BF16)]
)
def test_fp8_rows(form: int, heads: int, width: int, value: int, dtype: torch.dtype) -> None:
    """Compared with the unpacked rows; unused rows are NaN."""
    gqa = TritonGQA(num_programs=5)
    queries, size = paged_queries([(1, 130), (20, 90), (1, 3)], 8)
    mine = torch.cat([slots_of(queries, r) for r in range(3)])
    caches, numbers = [], []
    for magnitude, channels in ((1.0, width), (0.01, value)):
        rows = head_records.pack(normal(size, 2, channels, dtype=dtype, scale=magnitude), form)
        numbers.append(head_records.unpack(rows, channels))
        poisoned = torch.full_like(rows.view(torch.uint8), 0xFF)
        poisoned[mine] = rows.view(torch.uint8)[mine]
        caches.append(poisoned.view(rows.dtype))
    q = normal(queries.num_tokens, heads, width, dtype=dtype)
    close(gqa.paged(q, *caches, queries, 0.1, None), grouped_attention(q, *numbers, queries, 0.1), 2)
    with pytest.raises(ValueError, match="queries are"):
        gqa.paged(q, caches[0], numbers[1].to(dtype), queries, 0.1, None)


def test_a_step_of_two_groups_is_planned_before_its_layers() -> None:
    gqa = TritonGQA(num_programs=6)
    groups = [paged_queries(lens, 4)[0] for lens in ([(1, 90), (1, 20)], [(17, 60)])]
    q = normal(19, 4, 32, dtype=FP32)
    for _ in range(2):  # the layers of the first step determine the shape of the second step's plan
        plan = gqa.plan(AttentionBatch(*groups))
        for queries, mine in zip(groups, q.split([2, 17])):
            keys, values = (filled_cache(queries, 160, 2, 32, dtype=FP32) for _ in range(2))
            close(
                gqa.paged(mine, keys, values, queries, 0.2, plan),
                grouped_attention(mine, keys, values, queries, 0.2),
                2,
            )
    assert all(len(plan.of(queries)._schedules) == 1 for queries in groups)


def test_layers_with_each_window_are_planned_as_they_are() -> None:
    """Layers with a window have other KV heads: plans made before the step, and in place, keep both apart."""
    gqa = TritonGQA(num_programs=6)
    whole, size = paged_queries([(1, 90), (1, 170)], 4)
    layers = [(whole, 1), (replace(whole, window=200), 2)]  # a window that hides nothing
    q = normal(2, 4, 64, dtype=FP32)
    caches = [[filled_cache(whole, size, groups, 64, dtype=FP32) for _ in "kv"] for _, groups in layers]
    for queries, kv in ((queries, kv) for _ in range(2) for (queries, _), kv in zip(layers, caches)):
        plan = gqa.plan(AttentionBatch(queries, None))
        close(gqa.paged(q, *kv, queries, 0.2, plan), grouped_attention(q, *kv, queries, 0.2), 2)
    assert len(plan.of(layers[1][0])._schedules) == 1
    plans = [gqa.plan_in_place(AttentionBatch(queries, None)) for queries, _ in layers]
    for plan, (queries, _), kv in zip(plans, layers, caches):
        close(gqa.paged(q, *kv, replace(queries), 0.2, plan), grouped_attention(q, *kv, queries, 0.2), 2)
        assert plan is not None and len(plan._schedules) == 1


def test_trees() -> None:
    gqa = TritonGQA(num_programs=5)
    queries, size = paged_queries([(1, 70), (7, 7), (64, 64), (5, 131)], 16)
    queries, trees = random_trees(queries)
    keys, values = (filled_cache(queries, size, 2, 48, dtype=BF16) for _ in range(2))
    q = normal(queries.num_tokens, 6, 48, dtype=BF16)
    got = gqa.paged(q, keys, values, queries, 0.1, gqa.plan(AttentionBatch(queries, None)))
    close(got, grouped_attention(q, keys, values, queries, 0.1, trees), 2)


def test_deterministic_bits_depend_on_the_request_alone() -> None:
    """The row as built with --enable-deterministic-inference."""
    gqa = chosen(tables.GQA, "auto", deterministic=True).build()
    queries, size = paged_queries([(1, 600), (3, 20), (2, 1050)], 16)
    keys, values = (filled_cache(queries, size, 2, 32, dtype=BF16) for _ in range(2))
    q = normal(queries.num_tokens, 4, 32, dtype=BF16)
    whole = gqa.paged(q, keys, values, queries, 0.2, None).split(queries.query_lens)
    for request, mine in enumerate(q.split(queries.query_lens)):
        assert torch.equal(gqa.paged(mine, keys, values, only(queries, request), 0.2, None), whole[request])
    close(torch.cat(whole), grouped_attention(q, keys, values, queries, 0.2), 2)


@pytest.mark.parametrize("deterministic", [True, False])
def test_neighbors_change_bits_unless_the_launch_forbids_it(deterministic: bool) -> None:
    gqa = chosen(tables.GQA, "triton", deterministic).build()
    queries, size = paged_queries([(1, 1100), (1, 620), (1, 900)], 16)
    keys, values = (filled_cache(queries, size, 1, 16, dtype=FP32) for _ in range(2))
    q = normal(queries.num_tokens, 2, 16, dtype=FP32)
    together = gqa.paged(q, keys, values, queries, 0.2, None)
    alone = [gqa.paged(q[i : i + 1], keys, values, only(queries, i), 0.2, None) for i in range(3)]
    assert torch.equal(torch.cat(alone), together) == deterministic
    close(together, grouped_attention(q, keys, values, queries, 0.2), 2)


def chosen(rows: list[Row], asked: str, deterministic: bool) -> Choice:
    gpu = Device("cuda", "GPU", (9, 0))
    return select("attention", rows, asked, gpu, Need("bfloat16", deterministic=deterministic))


def test_nothing_to_do_and_what_is_refused() -> None:
    gqa = TritonGQA()
    queries, _ = paged_queries([])
    cache = torch.empty(8, 2, 16)
    assert gqa.paged(torch.empty(0, 4, 16), cache, cache, queries, 1.0, None).shape == (0, 4, 16)
    queries, size = paged_queries([(3, 9)])
    with pytest.raises(ValueError, match="cache is"):
        gqa.paged(torch.zeros(3, 4, 16), torch.zeros(size, 2, 16, dtype=BF16), cache, queries, 1.0, None)


@pytest.mark.parametrize(("count", "heads", "groups"), [(1, 6, 2), (4, 8, 1)])
def test_plans_in_place_follow_the_queries(count: int, heads: int, groups: int) -> None:
    """One plan renewed in its memory with upper bounds of other lengths: several query tokens, padding."""
    gqa = TritonGQA(num_programs=5)
    queries, size = paged_queries([(count, 150)] * 4, 8)
    assert gqa.capabilities.plan_in_place(AttentionBatch(queries, None)) is None  # before the first run
    keys, values = (filled_cache(queries, size, groups, 64, dtype=FP32) for _ in "kv")
    q = normal(queries.num_tokens, heads, 64, dtype=FP32)
    gqa.paged(q, keys, values, queries, 0.125, gqa.plan(AttentionBatch(queries, None)))
    plan = gqa.plan_in_place(AttentionBatch(queries, None))
    assert plan is not None and plan.on_device
    places, bounds = set(), ([150, 150, 7, 70], [count] * 4, [150] * 4)
    for lens, most in zip(([150, count, 7, 64], [count] * 4, [9, 131, 140, 8]), bounds):
        fresh, size = paged_queries([(count, length) for length in lens], 8)
        keys, values = (filled_cache(fresh, size, groups, 64, dtype=FP32) for _ in "kv")
        queries.context_lens[:] = most
        queries.context_lens_device.copy_(fresh.context_lens_device)
        queries.rows.copy_(fresh.rows)
        queries.slot_table[:, : fresh.slot_table.shape[1]].copy_(fresh.slot_table)
        plan.renew()
        close(
            gqa.paged(q, keys, values, replace(queries), 0.125, plan),
            grouped_attention(q, keys, values, fresh, 0.125),
            2,
        )
        (made,) = plan._schedules.values()
        places.add((made.segments.data_ptr(), made.merges.data_ptr(), len(made.segments), made.num_partials))
    assert len(places) == 1
    fixed = TritonGQA(deterministic=True, num_programs=5)
    fixed.paged(q, keys, values, queries, 0.125, None)
    assert fixed.plan_in_place(AttentionBatch(queries, None)) is None, "fixed cuts have no largest schedule"


def test_layers_over_selections_have_plans_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured launch has the schedule of its plan, which `renew` updates, although layers of both kinds have run."""
    from moe_engine.kernels.attention.triton import attention
    from moe_engine.kernels.queries import AttentionBatch, PagedQueries

    monkeypatch.setattr(attention, "paged_attention", lambda *args: None)
    backend, numbers = attention.TritonGQA(num_programs=8), torch.arange(5, dtype=torch.int32)
    table, cache = torch.zeros(2, 64, dtype=torch.int32), torch.zeros(64, 2, 16)
    whole = PagedQueries([1], [40], numbers[:1], numbers[:2], numbers[4:], table, 1)
    chosen = PagedQueries([1, 1], [20, 20], numbers[:2], numbers[:3], numbers[2:4], table, 1, selected=True)
    layers = [(whole, torch.zeros(1, 4, 16), cache), (chosen, torch.zeros(2, 2, 16), cache.view(-1, 1, 16))]
    for queries, q, kv in layers:
        backend.paged(q, kv, kv, queries, 1.0, backend.plan(AttentionBatch(queries, None)))
    for queries, q, kv in layers:
        plan = backend.plan_in_place(AttentionBatch(queries, None))
        assert plan is not None
        backend.paged(q, kv, kv, queries, 1.0, plan)
        assert len(plan._schedules) == 1
