"""Simulated devices refuse invalid operations as CUDA does, and report races that a GPU does not report."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from moe_engine.kernels.triton import guard
from moe_engine.kernels.uploads import upload
from tests.simulated_cuda import specializations, streams
from tests.simulated_cuda.streams import HazardError

GPU = torch.device("cuda", 0)


@triton.jit
def double_kernel(x, out, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + places, 2 * tl.load(x + places, mask=places < n), mask=places < n)


def double(x: torch.Tensor, out: torch.Tensor) -> None:
    double_kernel[(triton.cdiv(x.numel(), 4),)](x, out, x.numel(), BLOCK=4)


def test_devices_are_not_mixed() -> None:
    x = torch.ones(3, device=GPU)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        double(x, torch.empty(3))
    assert (x * torch.tensor(2.0)).tolist() == [2.0] * 3  # a number may be


def test_compilations_after_ready_are_listed() -> None:
    """Of new alignments and divisibilities, of types and constants."""
    x = torch.ones(64, device=GPU)
    guard.reset()
    double(x, x.clone())
    guard.ready()
    try:
        double(torch.zeros(64, device=GPU), x)
        assert specializations.late == []
        double(x[1:], x)
        assert "double_kernel" in specializations.late[0] and len(specializations.late) == 1
        double(x.double(), x)
        double(x.double()[:48], x)
        assert len(specializations.late) == guard.compilations_after_ready() == 2
    finally:
        guard.reset()


def _name_of_device(_: int) -> str:
    return torch.cuda.get_device_name()


def test_a_forked_process_has_no_devices() -> None:
    torch.cuda.is_available()  # enough
    refused = pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess")
    with multiprocessing.get_context("fork").Pool(1) as pool, refused:
        pool.map(_name_of_device, [0])


def test_new_memory_is_poisoned() -> None:
    assert torch.empty(5, device=GPU).isnan().all()
    assert torch.empty(2, dtype=torch.int32, device=GPU).tolist() == [-1, -1]


def test_waits_are_listed() -> None:
    x = torch.arange(4.0, device=GPU)
    calls: list[Callable[[], object]] = [
        lambda: x.sum().item(), lambda: x.tolist(), lambda: x[x > 1], lambda: torch.ones(3).to(GPU),
        lambda: x.cpu(), lambda: x.__setitem__(0, 3.0), lambda: torch.cuda.synchronize(),
    ]  # fmt: skip
    for place, call in enumerate(calls):
        streams.waits.clear()
        call()
        assert streams.waits, place
    streams.waits.clear()
    y = torch.ones(4).pin_memory().to(GPU, non_blocking=True)
    y.add_(x).mul_(2)
    y[1:3] = 7
    assert not streams.waits


def test_float8_is_not_indexed() -> None:
    """Only copied, joined and selected; bytes are."""
    x, places = torch.zeros(4, 3, dtype=torch.float8_e4m3fn, device=GPU), torch.tensor([2, 1], device=GPU)
    for call in (lambda: x[places], lambda: x.index_copy_(0, places, x[:2].clone())):
        with pytest.raises(NotImplementedError, match="float8_e4m3fn"):
            call()
    assert x.view(torch.uint8)[places].shape == x.index_select(0, places).shape == torch.cat((x[:1], x[1:2])).shape


def test_of_several_values_for_one_place_any_is_kept() -> None:
    places, values = torch.zeros(9, dtype=torch.int64, device=GPU), torch.arange(9.0, device=GPU)
    graph, replayed = torch.cuda.CUDAGraph(), torch.zeros(3, device=GPU)
    with torch.cuda.graph(graph):
        replayed.index_copy_(0, places, values)
    found: list[set[float]] = [set() for _ in range(4)]
    for _ in range(12):
        x = [torch.zeros(3, device=GPU) for _ in range(3)]
        x[0].index_copy_(0, places, values)
        x[1][places] = values
        x[2].scatter_(0, places, values)
        graph.replay()
        for kept, result in zip(found, (*x, replayed)):
            kept.add(result[0].item())
    assert all(len(kept) > 1 for kept in found)
    x[0].index_copy_(0, torch.tensor([2, 0], device=GPU), values[:2])
    assert x[0].tolist()[::2] == [1.0, 0.0]


def test_a_download_is_complete_after_its_event() -> None:
    x, host = torch.arange(4.0, device=GPU), torch.empty(4, pin_memory=True)
    host.copy_(x, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    x.zero_()
    assert host.isnan().all()
    done.synchronize()
    assert host.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_the_source_of_an_upload_must_stay_unchanged() -> None:
    host = torch.ones(4).pin_memory()
    host.to(GPU, non_blocking=True)
    host.zero_()
    with pytest.raises(HazardError, match="changed while its upload"):
        torch.cuda.synchronize()


@pytest.mark.parametrize("dtypes", [(torch.int64, torch.int64), (torch.int64, torch.int32)])
def test_copies_of_lists(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """In one launch or in several: of tensors, and of parts of buffers."""
    into = [torch.zeros(5, dtype=dtype, device=GPU) for dtype in dtypes]
    sources = [torch.arange(3, dtype=dtype, device=GPU) + index for index, dtype in enumerate(dtypes)]
    torch._foreach_copy_([x[:3] for x in into], sources)
    assert [x.tolist() for x in into] == [[0, 1, 2, 0, 0], [1, 2, 3, 0, 0]]


def test_graphs_read_the_current_values_of_their_inputs() -> None:
    x, out = torch.zeros(6, device=GPU), torch.zeros(6, device=GPU)
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = x + 1
        double(between, out)
    kept = between.data_ptr()
    assert out.tolist() == [0.0] * 6  # no launch ran
    for value in (1.0, 4.0):
        x.fill_(value)
        graph.replay()
        assert out.tolist() == [2 * value + 2] * 6
    assert between.data_ptr() == kept and between.tolist() == [5.0] * 6
    lost = out.new_zeros(6)
    with torch.cuda.graph(other, pool=graph.pool()):
        temporary = x * 3
        lost.copy_(temporary)
    del temporary, between
    graph.replay()
    other.replay()
    graph.replay()
    assert lost.tolist() == [12.0] * 6 and out.tolist() == [10.0] * 6


def test_graphs_refuse_calls_that_cannot_be_captured() -> None:
    x = torch.zeros(3, device=GPU)
    for call, part in (
        (lambda: x.tolist(), "not permitted when stream is capturing"),
        (lambda: torch.ones(3).to(GPU), "pageable memory"),
        (lambda: x[x > 0], "not permitted when stream is capturing"),
        (lambda: upload(np.ones(3), GPU), "from freed memory"),
    ):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match=part), torch.cuda.graph(graph):
            call()


def test_copies_of_strided_host_memory_go_through_pageable_memory() -> None:
    pinned = torch.ones(4, 6).pin_memory()
    x = torch.zeros(4, 6, device=GPU)
    direct = [(x, pinned), (x[:, ::2], torch.ones(4, 3).pin_memory()), (x.t(), pinned.t()), (x[1:3], pinned[:2])]
    direct += [(host, device) for device, host in direct]
    strided = [(x[:, :3], pinned[:, :3]), (x, pinned[:1]), (x, torch.ones(6, 4).pin_memory().t())]
    strided += [(pinned[:, ::2], x[:, ::2])]
    for copies, waits in ((direct, False), (strided, True)):
        for into, source in copies:
            torch.cuda.synchronize()
            streams.waits.clear()
            into.copy_(source, non_blocking=True)
            assert bool(streams.waits) == waits, (into.stride(), source.stride())
    with pytest.raises(RuntimeError, match="pageable memory"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x[:, :3].copy_(pinned[:, :3], non_blocking=True)


def test_memory_that_a_graph_reads_must_be_kept() -> None:
    x, out = torch.ones(3, device=GPU), torch.zeros(3, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(x)
    graph.replay()
    assert out.tolist() == [1.0] * 3
    del x
    with pytest.raises(HazardError, match="reads memory that was given back"):
        graph.replay()
    x = torch.ones(3, device=GPU)
    with torch.cuda.graph(graph):
        out.copy_(x)
    del out
    with pytest.raises(HazardError, match="writes to memory that was given back"):
        graph.replay()


def test_captured_copies_take_as_long_as_others() -> None:
    x, source, found = torch.zeros(3, device=GPU), torch.ones(3).pin_memory(), torch.zeros(3).pin_memory()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(source, non_blocking=True)
        found.copy_(x, non_blocking=True)
    graph.replay()
    assert found.isnan().all()
    torch.cuda.synchronize()
    assert found.tolist() == [1.0] * 3
    graph.replay()
    source.zero_()
    with pytest.raises(HazardError, match="changed while its upload"):
        torch.cuda.synchronize()


def test_events_belong_to_a_device_and_end_with_a_wait() -> None:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.zeros(1, device=GPU)
    end.record()
    with pytest.raises(RuntimeError, match="device not ready"):
        begin.elapsed_time(end)
    end.synchronize()
    assert begin.elapsed_time(end) > 0
    with pytest.raises(RuntimeError, match="does not match recording stream's device"):
        end.record(torch.cuda.Stream(1))


def test_memory_that_tensors_give_back_stays_in_the_cache() -> None:
    torch.cuda.empty_cache()
    before, x = torch.cuda.mem_get_info()[0], torch.empty(1 << 20, device=GPU)
    del x
    assert torch.cuda.mem_get_info()[0] == before - (4 << 20)
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == before


def test_host_memory_that_a_graph_copies_must_be_kept() -> None:
    """Pinned memory belongs to its tensors: a graph reads and writes what the allocator gave to others."""
    x, kept = torch.zeros(3, device=GPU), torch.ones(3).pin_memory()
    for into, source in ((x, kept), (kept, x)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            into.copy_(source, non_blocking=True)
        graph.replay()
    del into, source
    lost = torch.ones(3).pin_memory()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        x.copy_(lost, non_blocking=True)
    graph.replay()
    del lost
    with pytest.raises(HazardError, match="given back"):
        graph.replay()


def test_streams_must_be_ordered_by_events() -> None:
    side, x = torch.cuda.Stream(), torch.ones(4, device=GPU)
    with torch.cuda.stream(side), pytest.raises(HazardError, match="nothing puts them in order"):
        x.add_(1)
    x = torch.ones(4, device=GPU)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
        done = side.record_event()
    with pytest.raises(HazardError, match="nothing puts them in order"):
        x.mul_(2)
    torch.cuda.current_stream().wait_event(done)
    assert x.mul_(2).tolist() == [4.0] * 4
    left, right = x[:2], x[2:]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        left.add_(1)
    right.add_(1)  # other bytes
    torch.cuda.current_stream().wait_stream(side)


def by_index(x: torch.Tensor, rows: list[int]) -> list[Callable[[], object]]:
    """Calls that use these rows of x [n, m] alone: writes, then reads."""
    places = torch.tensor(rows, device=GPU)
    values = torch.ones(len(rows), x.shape[1], device=GPU)
    wide = places[:, None].expand_as(values)
    return [
        lambda: x.index_copy_(0, places, values), lambda: x.__setitem__(places, values),
        lambda: x.scatter_(0, wide, values), lambda: x.index_fill_(0, places, 1.0),
        lambda: x.t().index_copy_(1, places, values.t()),
        lambda: x.index_select(0, places), lambda: x[places], lambda: x.gather(0, wide),
    ]  # fmt: skip


NUM_WRITES = 5


@pytest.mark.parametrize("replayed", [False, True])
def test_operators_by_index_use_their_rows(replayed: bool) -> None:
    """Streams may use other rows of a tensor at the same time; of the same rows one of them at most reads."""
    for other, overlaps in (([0, 3], False), ([5, 3], True)):
        for number, _ in enumerate(by_index(torch.zeros(6, 2, device=GPU), [0])):
            for second in range(NUM_WRITES if number >= NUM_WRITES else 2):
                x, side = torch.zeros(6, 2, device=GPU), torch.cuda.Stream()
                own, call = by_index(x, [1, 5])[number], by_index(x, other)[second]
                graph = torch.cuda.CUDAGraph()
                if replayed:
                    with torch.cuda.graph(graph):
                        own()
                side.wait_stream(torch.cuda.current_stream())
                (graph.replay if replayed else own)()
                with torch.cuda.stream(side):
                    if overlaps:
                        with pytest.raises(HazardError, match="nothing puts them in order"):
                            call()
                    else:
                        call()
                torch.cuda.synchronize()


def test_freed_memory_is_reused_behind_its_own_stream_only() -> None:
    side, x = torch.cuda.Stream(), torch.ones(4, device=GPU)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    del x
    with pytest.raises(HazardError, match="given back since"):
        torch.zeros(1, device=GPU)
    torch.cuda.current_stream().wait_stream(side)
    x = torch.ones(4, device=GPU)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    x.record_stream(side)
    del x
    torch.zeros(1, device=GPU)
