"""Weights brought to the L2 cache while the memory is idle, for the product that reads them next.

The launches of a small decode step wait for each other, and the memory is idle meanwhile. Weights do not depend on the
launches before, so they are requested early: a product requests its own before it waits for its inputs, and the router
those of the shared experts, which every token uses. A request takes no register, delays no instruction and changes no
value: one that comes too late, or for a weight that is being written, only costs bandwidth.
Sources: PTX ISA, "cp.async.bulk.prefetch"; CUTLASS, example 63 (products of few rows that prefetch weights to L2 before
they wait for the launch before).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra import cuda

from moe_engine.kernels.device import starts_early

BESIDE_ROUTER = 22 << 20
"""Most bytes that a router's launch requests: about those that an H200's memory sends while its programs wait for each
other, and while the sort of its choices runs."""
IN_GAP = 5 << 20
"""Most bytes that a norm requests at its end, for the product behind it: those of the gap between both. Products of few
rows request more themselves, and a norm of many needs the memory before."""
UNIT = 16
"""Sizes and addresses of requests are multiples of it."""


def can_request(weight: Tensor) -> bool:
    """Whether the device of a contiguous weight has the instruction, and takes its address."""
    return starts_early(weight.device.type) and weight.data_ptr() % UNIT == 0


def requested(weight: Tensor | None, most: int) -> tuple[Tensor | None, int]:
    """A contiguous weight to request and the bytes of it, at most `most`; or None and 0."""
    count = 0 if weight is None or not can_request(weight) else min(weight.nbytes, most) // UNIT * UNIT
    return (weight, count) if count else (None, 0)


_LINE = tl.constexpr(128)
"""Bytes of a line of the cache."""


@triton.jit
def share_of(place, count, begin, end):
    """(first byte, bytes) of share `place` of bytes [begin, end) in `count` shares of whole lines; the last may have
    fewer bytes, or none."""
    each = tl.cdiv(tl.cdiv(end - begin, count), _LINE) * _LINE
    first = begin + place * each
    return first, tl.maximum(tl.minimum(end - first, each), 0)


if knobs.runtime.interpret:

    def prefetch_shared(start: object, BYTES: object) -> None:
        """No effect: there is no cache."""

    def prefetch_own(start: object, begin: object, BYTES: object, OF: object) -> None:
        """No effect, as above."""
else:

    @triton.jit
    def prefetch_shared(start, BYTES: tl.constexpr):
        """Requests BYTES from `start` on; each program of the launch calls it and requests its share."""
        if BYTES > 0:
            program = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
            programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
            first, count = share_of(program, programs, 0, BYTES)
            _request(start, first, first + count)

    @triton.jit
    def prefetch_own(start, begin, BYTES: tl.constexpr, OF: tl.constexpr):
        """Requests BYTES from byte `begin` of `start` on, up to byte OF: the weights of one program."""
        if BYTES > 0:
            _request(start, begin, tl.minimum(begin + BYTES, OF))

    @triton.jit
    def _request(start, begin, end):
        """Requests bytes [begin, end), multiples of 16, divided among the threads of a program."""
        THREADS: tl.constexpr = cuda.num_threads()
        first, count = share_of(tl.arange(0, THREADS), THREADS, begin, end)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r", [start.to(tl.int64) + first, count], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
