"""Sliding windows and chunks in rows of GQA: against the plain formula, with NaN in every slot outside the windows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_engine.kernels import registry, tables
from moe_engine.kernels.attention.protocol import GQABackend
from moe_engine.kernels.attention.reference import TorchGQA
from moe_engine.kernels.attention.schedule import Split, cut
from moe_engine.kernels.attention.vendors.fa3 import FA3GQA
from moe_engine.kernels.attention.vendors.flashinfer_gqa import FlashInferGQA
from moe_engine.kernels.attention_windows import ChunkWindow
from moe_engine.kernels.cpu.availability import why_not
from moe_engine.kernels.device import Device, Need, cpu_device
from moe_engine.kernels.kv_format.formats import FP8_TOKEN
from moe_engine.kernels.kv_format.head_records import pack, unpack
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.registry import select
from tests.kernels.cpu.formulas import close, normal, only, paged_queries, slots_of
from tests.kernels.vendors import fa3_emulator, flashinfer_emulator

LENS = [(1, 1), (1, 700), (3, 131), (40, 40), (70, 600), (1, 64), (2, 1100)]
WINDOWS = [1, 7, 64, 129, 513, *map(ChunkWindow, (1, 7, 64, 129, 513))]


def make(row: str) -> GQABackend:
    if row == "torch":
        return TorchGQA()
    if row == "cpu":
        if reason := why_not(cpu_device(), "float32"):
            pytest.skip(reason)
        from moe_engine.kernels.attention.cpu import CpuGQA

        return CpuGQA()
    if row == "fa3":
        return FA3GQA(fa3_emulator.module())
    return FlashInferGQA(flashinfer_emulator.module())


def windowed(lens: list[tuple[int, int]], page_size: int, window: int, poisoned: bool) -> tuple[PagedQueries, int]:
    """Queries with a window; the slot table has an unused slot for positions outside all windows."""
    queries, size = paged_queries(lens, page_size)
    queries = replace(queries, window=window)
    if poisoned:
        for row, first in zip(queries.rows.tolist(), queries.first_seen):
            queries.slot_table[row, :first] = size
    return queries, size + 1


def filled(queries: PagedQueries, size: int, *width: int, dtype: torch.dtype) -> Tensor:
    cache = torch.full((size, *width), float("nan"), dtype=dtype)
    for request, first in enumerate(queries.first_seen):
        slots = slots_of(queries, request)[first:]
        cache[slots] = normal(len(slots), *width, dtype=dtype)
    return cache


def want(
    q: Tensor, keys: Tensor, values: Tensor, queries: PagedQueries, scale: float, sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Expected result in float64, token by token."""
    parts, start = [], 0
    share, window = q.shape[1] // keys.shape[1], queries.window
    assert window is not None
    for request, (count, context) in enumerate(zip(queries.query_lens, queries.context_lens)):
        slots = slots_of(queries, request)
        for token in range(count):
            own = context - count + token
            chunked = isinstance(window, ChunkWindow)
            seen = slots[own // window * window if chunked else max(0, own - window + 1) : own + 1]
            k, v = (cache[seen].double().repeat_interleave(share, 1) for cache in (keys, values))
            scores = torch.einsum("hd,shd->hs", q[start + token].double(), k) * scale
            scores = cap * (scores / cap).tanh() if cap else scores
            weights = scores.exp()
            total = weights.sum(-1) if sinks is None else weights.sum(-1) + sinks.double().exp()
            parts.append(torch.einsum("hs,shd->hd", weights / total.unsqueeze(-1), v))
        start += count
    return torch.stack(parts)


def check_poisoned(backend: GQABackend, window: int, dtype: torch.dtype) -> None:
    """This project's kernels read no row outside a window."""
    queries, size = windowed(LENS, random.choice([1, 16]), window, poisoned=True)
    keys, values = (filled(queries, size, 2, 48, dtype=dtype) for _ in range(2))
    q = normal(queries.num_tokens, 6, 48, dtype=dtype)
    plan = backend.plan(AttentionBatch(queries, None))
    close(backend.paged(q, keys, values, queries, 0.15, plan), want(q, keys, values, queries, 0.15), 3)


def check_sinks(backend: GQABackend, window: int, dtype: torch.dtype) -> None:
    """Sinks smaller and larger than all scores, over split contexts and within windows."""
    queries, size = windowed(LENS, random.choice([1, 16]), window, poisoned=True)
    keys, values = (filled(queries, size, 2, 48, dtype=dtype) for _ in range(2))
    q, sinks = normal(queries.num_tokens, 6, 48, dtype=dtype), torch.tensor([-3.0, 0.5, 2.0, 9.0, -40.0, 1.0])
    plan, paged = backend.plan(AttentionBatch(queries, None)), backend.capabilities.sinks
    assert paged is not None
    close(paged(q, keys, values, queries, 0.15, plan, sinks), want(q, keys, values, queries, 0.15, sinks), 3)


def check_capped(backend: GQABackend, window: int, dtype: torch.dtype) -> None:
    """Scores far within their bound and far beyond it, with sinks and without, over split contexts."""
    queries, size = windowed(LENS, random.choice([1, 16]), window, poisoned=True)
    keys, values = (filled(queries, size, 2, 48, dtype=dtype) for _ in range(2))
    q, capped = normal(queries.num_tokens, 6, 48, dtype=dtype), backend.capabilities.capped
    q[::2] *= 10
    assert capped is not None
    for sinks, cap in ((None, 2.0), (torch.randn(6), 2.0), (None, 50.0)):
        plan = backend.plan(AttentionBatch(queries, None))
        got = capped(q, keys, values, queries, 0.15, plan, sinks, cap)
        close(got, want(q, keys, values, queries, 0.15, sinks, cap), 3)


def check_fp8(backend: GQABackend) -> None:
    queries, size = windowed([(1, 300), (20, 90)], 8, 33, poisoned=False)
    rows = [pack(normal(size, 2, 64, dtype=torch.bfloat16), FP8_TOKEN) for _ in range(2)]
    q = normal(queries.num_tokens, 4, 64, dtype=torch.bfloat16)
    numbers = [unpack(part, 64) for part in rows]
    close(backend.paged(q, *rows, queries, 0.1, None), want(q, *numbers, queries, 0.1), 3)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("row", ["torch", "cpu"])
def test_nothing_outside_the_window_is_read(row: str, window: int) -> None:
    check_poisoned(make(row), window, torch.float32)


@pytest.mark.parametrize("window", [20, 5000, ChunkWindow(20)])
@pytest.mark.parametrize("row", ["torch", "cpu"])
def test_sinks(row: str, window: int) -> None:
    check_sinks(make(row), window, torch.float32)


@pytest.mark.parametrize("window", [20, 5000, ChunkWindow(20)])
@pytest.mark.parametrize("row", ["torch", "cpu"])
def test_bounded_scores(row: str, window: int) -> None:
    check_capped(make(row), window, torch.float32)


@pytest.mark.parametrize("window", [1, 30, 128])
@pytest.mark.parametrize("row", ["flashinfer", "fa3"])
def test_libraries_get_the_window(row: str, window: int) -> None:
    backend = make(row)
    queries, size = windowed(LENS, 16, window, poisoned=False)
    size += 15  # whole pages
    keys, values = (torch.nan_to_num(normal(size, 2, 64, dtype=torch.bfloat16)) for _ in range(2))
    q = normal(queries.num_tokens, 8, 64, dtype=torch.bfloat16)
    plan = backend.plan(AttentionBatch(queries, None))
    close(backend.paged(q, keys, values, queries, 0.15, plan), want(q, keys, values, queries, 0.15), 3)


def test_fp8_rows() -> None:
    check_fp8(make("cpu"))


def test_a_token_has_the_same_bits_in_every_batch_on_the_cpu() -> None:
    backend = make("cpu")
    queries, size = windowed(LENS, 16, 100, poisoned=True)
    keys, values = (filled(queries, size, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    q = normal(queries.num_tokens, 12, 64, dtype=torch.bfloat16)
    whole = backend.paged(q, keys, values, queries, 0.1, None).split(queries.query_lens)
    for request, mine in enumerate(q.split(queries.query_lens)):
        for token in {0, len(mine) // 2, len(mine) - 1}:
            alone = replace(only(queries, request, slice(token, token + 1)), window=100)
            got = backend.paged(mine[token : token + 1], keys, values, alone, 0.1, None)
            assert torch.equal(got, whole[request][token : token + 1])


def test_schedules_leave_out_tiles_before_the_window() -> None:
    window, split = 100, Split(16, 64, 7)
    segments, _, _ = cut([1, 1, 40], [1000, 50, 900], 4, split, window=window)
    for request, _, _, row, first_seen_by, begin, stop, _ in segments.tolist():
        lowest = max(0, first_seen_by + row // 4 - window)
        assert begin // 64 >= (max(0, [999, 49, 860][request] - 99)) // 64
        assert begin < stop and stop > lowest
    read = sum(stop - begin for _, _, _, _, _, begin, stop, _ in segments.tolist())
    assert read < sum(stop - begin for _, _, _, _, _, begin, stop, _ in cut([1, 1, 40], [1000, 50, 900], 4, split)[0])


def test_trees_have_no_window() -> None:
    queries, _ = paged_queries([(2, 9)])
    tree = replace(queries, visible=torch.tensor([1, 3]))
    with pytest.raises(ValueError, match="no window"):
        replace(tree, window=4)


def test_the_tables_know_which_rows_have_windows() -> None:
    """Rows of MLA are refused; the capability of every row matches the table."""
    assert not any(registry.WINDOWS in row.supports for row in tables.MLA)
    assert all(registry.WINDOWS in row.supports for row in tables.GQA)
    assert {row.name for row in tables.GQA if registry.CHUNKED in row.supports} == {"torch", "cpu", "triton"}
    with pytest.raises(ValueError, match="no chunked attention"):
        select("attention", tables.GQA, "fa3", Device("cuda", "H100", (9, 0)), Need("bfloat16", chunked=True))
    with pytest.raises(ValueError, match="no bounded scores"):
        select("attention", tables.GQA, "fa3", Device("cuda", "H100", (9, 0)), Need("bfloat16", capped=True))
    for row in ("torch", "cpu", "flashinfer", "fa3"):
        assert make(row).capabilities.windows
    with pytest.raises(ValueError, match="no sliding windows"):
        select("attention", tables.MLA, "torch", Device("cpu", "CPU"), Need("float32", windows=True))
