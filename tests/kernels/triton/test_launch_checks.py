"""What the interpreter shows of a launch: results that depend on the order of its programs, reads of uninitialized
memory, accesses outside of its arguments, and programs and threads that read what others write."""

from __future__ import annotations

import random

import pytest
import torch

from tests.kernels.triton.memory_check import checked_accesses

triton = pytest.importorskip("triton", reason="needs triton")
tl = triton.language


@triton.jit
def chained_kernel(x):
    """Each program reads what the one before has written: a race on a device."""
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(x + place + 1, tl.load(x + place) + 1)


@triton.jit
def counting_kernel(x):
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(x + place, tl.load(x + place) + 1)


@pytest.fixture
def checked() -> None:
    """Not here: these kernels are wrong."""


def test_programs_run_once_in_another_order_each_time() -> None:
    counts = torch.zeros(60, dtype=torch.int32)
    found = set()
    for _ in range(4):
        counting_kernel[(12, 5)](counts)
        chained = torch.zeros(61, dtype=torch.int32)
        chained_kernel[(12, 5)](chained)
        found.add(tuple(chained.tolist()))
    assert counts.tolist() == [4] * 60
    assert len(found) > 1 and tuple(range(61)) not in found


@pytest.mark.parametrize("grid", [(0,), (3, 0), (1, 65536), (1, 1, 65536), (1 << 16, 1 << 15), (1 << 31,)])
def test_a_grid_that_no_device_launches_is_found(grid: tuple[int, ...]) -> None:
    with pytest.raises(Exception, match="cannot be launched with a grid of"):
        counting_kernel[grid](torch.zeros(1, dtype=torch.int32))


def test_uninitialized_memory_has_no_plausible_values() -> None:
    x = torch.ones(8)
    for memory in (torch.empty(3), torch.empty_like(x), x.new_empty(2, 2), torch.empty(2, dtype=torch.bfloat16)):
        assert memory.isnan().all()
    assert torch.empty(2, dtype=torch.int32).tolist() == [torch.iinfo(torch.int32).max] * 2


@triton.jit
def copy_kernel(x, out, length, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    value = tl.load(x + column, column < length, 0.0) if MASKED else tl.load(x + column)
    tl.store(out + column, value, column < length)


@triton.jit
def last_kernel(x, parts, ticket, out, ORDER: tl.constexpr, PARTS: tl.constexpr, WAITS: tl.constexpr):
    """The last program to arrive adds the pairs that all have written; without ORDER program 0 does, without waiting.
    WAITS: all threads of a program arrive."""
    place = tl.program_id(0) * 2 + tl.arange(0, 2)
    tl.store(parts + place, tl.load(x + place))
    if WAITS:
        tl.debug_barrier()
    last = tl.program_id(0) == 0
    if ORDER is not None:
        last = tl.atomic_add(ticket, 1, sem=ORDER) == PARTS - 1
    if last:
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, 2 * PARTS)), 0))


def test_a_tail_without_a_mask_is_found() -> None:
    length = random.randint(65, 127)
    x, out = torch.randn(length), torch.zeros(length)
    with checked_accesses():
        copy_kernel[(1,)](x, out, length, MASKED=True, BLOCK=128)
        assert torch.equal(out, x)
        with pytest.raises(Exception, match=f"copy_kernel reads {128 - length} of 128 elements outside"):
            copy_kernel[(1,)](x, out, length, MASKED=False, BLOCK=128)


@triton.jit
def aligned_kernel(x, out, offset, HINT: tl.constexpr):
    """The number of four bytes at an offset."""
    tl.store(out, tl.load((x + tl.multiple_of(offset, HINT)).to(tl.pointer_type(tl.int32))))


def test_an_address_that_is_not_aligned_is_found() -> None:
    x, out = torch.arange(64, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    with checked_accesses():
        aligned_kernel[(1,)](x, out, 12, HINT=4)
        assert out.item() == 12 + (13 << 8) + (14 << 16) + (15 << 24)
        with pytest.raises(Exception, match="4 bytes at addresses that are not aligned"):
            aligned_kernel[(1,)](x, out, 10, HINT=2)
        with pytest.raises(Exception, match=r"not a multiple of \[16\]"):
            aligned_kernel[(1,)](x, out, 12, HINT=16)


def test_a_race_between_programs_is_found() -> None:
    """Without an order, with one that makes no writes visible, and with an arrival ahead of other threads' writes."""
    x, out = torch.randn(16), torch.zeros(1)

    def run(order: str | None, waits: bool = True, warps: int = 4) -> None:
        ticket = torch.zeros(1, dtype=torch.int32)
        last_kernel[(8,)](x, torch.empty(16), ticket, out, ORDER=order, PARTS=8, WAITS=waits, num_warps=warps)

    with checked_accesses():
        for order, waits, warps in (("acq_rel", True, 4), ("acq_rel", False, 1)):
            run(order, waits, warps)
            torch.testing.assert_close(out[0], x.sum())
        for order, waits in ((None, True), ("relaxed", True), ("acquire", True), ("release", True), ("acq_rel", False)):
            with pytest.raises(Exception, match=r"last_kernel: program .* reads what program .* writes"):
                run(order, waits)


@triton.jit
def scatter_kernel(x, places, out, WAITS: tl.constexpr, BLOCK: tl.constexpr):
    """out[places] = x, in two programs, each of which starts with zeros."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + lane, 0.0)
    if WAITS:
        tl.debug_barrier()
    tl.store(out + tl.load(places + lane), tl.load(x + lane))


def test_values_written_to_one_place_are_found() -> None:
    """Any of them may stay, of programs and of threads. Equal ones are the same in any order."""
    places, x = torch.arange(64).flip(0).view(2, 32).flip(0).flatten(), torch.randn(64)
    with checked_accesses():
        scatter_kernel[(2,)](x, places, torch.zeros(64), WAITS=True, BLOCK=32)
        scatter_kernel[(2,)](x, torch.arange(64), torch.zeros(64), WAITS=False, BLOCK=32)
        scatter_kernel[(2,)](torch.zeros(64), places.clamp(32), torch.zeros(64), WAITS=False, BLOCK=32)
        with pytest.raises(Exception, match=r"scatter_kernel: threads write .* without a barrier"):
            scatter_kernel[(2,)](x, places, torch.zeros(64), WAITS=False, BLOCK=32)
        with pytest.raises(Exception, match=r"scatter_kernel: program .* writes what program .* writes"):
            scatter_kernel[(2,)](x, places.flip(0), torch.zeros(64), WAITS=True, BLOCK=32)


@triton.jit
def unread_kernel(x, out, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place, place < 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_elements_that_a_mask_leaves_out_are_undefined(dtype: torch.dtype) -> None:
    out = torch.zeros(8, dtype=dtype)
    unread_kernel[(1,)](torch.ones(8, dtype=dtype), out, BLOCK=8)
    assert out[:3].float().eq(1).all() and out[3:].float().isnan().all()
    for kind, large in ((torch.int32, 0x7F7F7F7F), (torch.uint8, 0x7F)):
        numbers = torch.zeros(8, dtype=kind)
        unread_kernel[(1,)](torch.ones(8, dtype=kind), numbers, BLOCK=8)
        assert numbers.tolist() == [1] * 3 + [large] * 5


def test_rows_written_in_place_are_no_race() -> None:
    x = torch.zeros(4, dtype=torch.int32)
    with checked_accesses():
        counting_kernel[(4, 1)](x, num_warps=1)
    assert x.tolist() == [1] * 4


@triton.jit
def reversed_kernel(x, BLOCK: tl.constexpr, WAITS: tl.constexpr, SAME: tl.constexpr):
    """x + 1, in reverse order unless SAME, in place."""
    place = tl.arange(0, BLOCK)
    value = tl.load(x + place) + 1
    if WAITS:
        tl.debug_barrier()
    tl.store(x + (place if SAME else BLOCK - 1 - place), value)


def test_a_race_between_threads_is_found() -> None:
    """A warp that is ahead would overwrite what another one has not read. All threads read a scalar."""
    x = torch.arange(256)
    with checked_accesses():
        reversed_kernel[(1,)](x, BLOCK=256, WAITS=True, SAME=False)
        reversed_kernel[(1,)](x, BLOCK=256, WAITS=False, SAME=True)
        assert x.tolist() == list(range(257, 1, -1))
        reversed_kernel[(1,)](x, BLOCK=256, WAITS=False, SAME=False, num_warps=1)
        for kernel, sizes in ((reversed_kernel, {"BLOCK": 256, "WAITS": False, "SAME": False}), (counting_kernel, {})):
            with pytest.raises(Exception, match=f"{kernel.__name__}: threads read .* without a barrier"):
                kernel[(1,)](x, **sizes)
