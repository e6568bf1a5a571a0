"""Sliding windows of grouped-query attention, under the interpreter: no row outside a window is read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_engine.kernels.attention_windows import ChunkWindow
from moe_engine.kernels.queries import AttentionBatch
from tests.kernels.cpu.formulas import close, normal, only
from tests.kernels.reference.test_windows import (
    LENS,
    WINDOWS,
    check_capped,
    check_fp8,
    check_poisoned,
    check_sinks,
    filled,
    want,
    windowed,
)

pytestmark = pytest.mark.drawn(5)

triton_attention = pytest.importorskip("moe_engine.kernels.attention.triton.attention", reason="needs triton")
TritonGQA = triton_attention.TritonGQA


@pytest.mark.parametrize("window", WINDOWS)
def test_nothing_outside_the_window_is_read(window: int) -> None:
    backend = TritonGQA(num_programs=9)
    assert backend.capabilities.windows
    check_poisoned(backend, window, torch.bfloat16)


@pytest.mark.parametrize("window", [20, 5000, ChunkWindow(20)])
def test_sinks(window: int) -> None:
    check_sinks(TritonGQA(num_programs=9), window, torch.float32)


@pytest.mark.parametrize("window", [20, 5000])
def test_bounded_scores(window: int) -> None:
    check_capped(TritonGQA(num_programs=9), window, torch.float32)


@pytest.mark.each_value
@pytest.mark.parametrize(("count", "heads", "groups"), [(1, 6, 2), (4, 8, 1), (3, 40, 2)])
@pytest.mark.parametrize("window", [1, 20, 64, 129, ChunkWindow(20), ChunkWindow(64), ChunkWindow(129)])
@pytest.mark.parametrize("sunk", [False, True])
def test_a_plan_in_place_follows_lengths_on_the_device(
    count: int, heads: int, groups: int, window: int, sunk: bool
) -> None:
    """The host plans by upper bounds of the lengths; NaN in every slot outside the true windows."""
    backend = TritonGQA(num_programs=7)
    queries, _ = windowed([(count, 400)] * 4, 16, window, poisoned=False)
    table = torch.zeros(len(queries.slot_table), 512, dtype=torch.int32)
    queries = replace(queries, slot_table=table)
    lens = [count, int(torch.randint(count, 400, ())), 64 + count, 400]
    bounds = [length + more for length, more in zip(lens, torch.randint(0, 7, (4,)).tolist())]
    fresh, size = windowed([(count, length) for length in lens], 16, window, poisoned=True)
    keys, values = (filled(fresh, size, groups, 64, dtype=torch.float32) for _ in "kv")
    q, sinks = normal(4 * count, heads, 64, dtype=torch.float32), torch.randn(heads) if sunk else None
    zeros = torch.zeros_like(keys)
    backend.paged(q, zeros, zeros, queries, 0.125, None, sinks)  # the plan in place is one for layers like this
    plan = backend.plan_in_place(AttentionBatch(queries, None))
    assert plan is not None and plan.on_device
    queries.context_lens[:] = bounds
    queries.context_lens_device.copy_(fresh.context_lens_device)
    queries.rows.copy_(fresh.rows)
    table[:, : fresh.slot_table.shape[1]].copy_(fresh.slot_table)
    plan.renew()
    close(backend.paged(q, keys, values, queries, 0.125, plan, sinks), want(q, keys, values, fresh, 0.125, sinks), 2)


def test_fp8_rows() -> None:
    check_fp8(TritonGQA(num_programs=5))


def test_deterministic_bits_do_not_depend_on_the_batch() -> None:
    backend = TritonGQA(deterministic=True)
    queries, size = windowed(LENS, 16, 600, poisoned=False)
    keys, values = (torch.nan_to_num(filled(queries, size, 2, 32, dtype=torch.bfloat16)) for _ in range(2))
    q = normal(queries.num_tokens, 8, 32, dtype=torch.bfloat16)
    whole = backend.paged(q, keys, values, queries, 0.2, None).split(queries.query_lens)
    for request, mine in enumerate(q.split(queries.query_lens)):
        alone = replace(only(queries, request), window=600)
        assert torch.equal(backend.paged(mine, keys, values, alone, 0.2, None), whole[request])
