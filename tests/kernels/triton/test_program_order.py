"""What the interpreter shows: results that depend on the order of a launch's programs, and uninitialized memory."""

from __future__ import annotations

import pytest
import torch

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


def test_uninitialized_memory_has_no_plausible_values() -> None:
    x = torch.ones(8)
    for memory in (torch.empty(3), torch.empty_like(x), x.new_empty(2, 2), torch.empty(2, dtype=torch.bfloat16)):
        assert memory.isnan().all()
    assert torch.empty(2, dtype=torch.int32).tolist() == [torch.iinfo(torch.int32).max] * 2
