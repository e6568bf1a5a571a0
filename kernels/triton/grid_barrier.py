"""A barrier between all programs of a launch, for kernels that read what other programs wrote before it.

All programs must be resident simultaneously: launch with ``launch_cooperative_grid=True`` and at most
`resident_programs` programs. CUDA refuses a cooperative launch that does not fit, so no program waits for one that
cannot start. Source: CUDA driver API, cuLaunchCooperativeKernel; PTX ISA, "Memory consistency model" (release and
acquire patterns are cumulative over barriers of a block).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

COOPERATIVE = {"launch_cooperative_grid": True}
"""Launch option, part of the compiled kernel's key."""

_ABSENT = 132
"""SMs of an H100 or H200."""


@lru_cache
def resident_programs(device: torch.device) -> int:
    """Programs that run together whatever their size: one per SM; 1 for devices that run them one after another."""
    if device == torch.device("meta"):  # ahead-of-time compilation
        return _ABSENT
    try:
        return torch.get_device_module(device).get_device_properties(device).multi_processor_count
    except (AttributeError, RuntimeError):
        return 1


def barrier_state(device: torch.device) -> Tensor:
    """int64 [1] of `grid_barrier`, for launches that do not overlap. Zeroed once, never reset."""
    return torch.zeros(1, dtype=torch.int64, device=device)


@triton.jit
def pause():
    """Sleeps about 30 ns, so that polling leaves the memory system to the programs that are awaited."""
    return tl.inline_asm_elementwise(
        "nanosleep.u32 32; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def grid_barrier(state):
    """Returns when all programs of a one-dimensional launch have called it; their writes are then visible to each.

    The low half of `state` counts arrivals; they sum up to 2^32 whatever their number, so that the last one changes the
    high half and leaves the low half at 0 for the next launch.
    """
    programs = tl.num_programs(0).to(tl.int64)
    step = tl.where(tl.program_id(0) == 0, 4294967297 - programs, 1).to(tl.int64)
    tl.debug_barrier()
    before = tl.atomic_add(state, step, sem="acq_rel", scope="gpu") >> 32
    waits = (tl.load(state, volatile=True) >> 32) == before
    while waits:
        pause()
        waits = (tl.load(state, volatile=True) >> 32) == before
    tl.atomic_add(state, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()
