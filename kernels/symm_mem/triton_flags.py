"""Flags between ranks, in Triton: raised with release semantics, awaited with acquire, for a bounded time.

A flag is an int64 in the waiting rank's memory and counts how often its writer has come so far (the epoch of a slot):
nothing is ever reset, so a captured graph may be replayed for ever. What a rank wrote anywhere before it raised a flag
is visible to whoever has seen the flag. Source: PTX ISA, "Memory consistency model" (release and acquire patterns at
system scope are cumulative over barriers of a block and over the tickets below).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def part_of(peers, rank, offset, ELEMENT: tl.constexpr):
    """Pointer to byte `offset` of a rank's memory, where this rank reaches it. Regions are aligned, which the compiler
    must be told: it would move numbers one by one."""
    return tl.multiple_of((tl.load(peers + rank) + offset).to(tl.pointer_type(ELEMENT)), 16)


@triton.jit
def nanoseconds():
    """The GPU's clock, int64; it ticks about every microsecond."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _some_are_late(flags, epoch, RANKS: tl.constexpr, LANES: tl.constexpr):
    """By a plain look: many programs wait for the same flags, and atomics would hold up whoever raises them."""
    lanes = tl.arange(0, LANES)
    seen = tl.load(flags + lanes, mask=lanes < RANKS, other=epoch, volatile=True)
    return tl.sum((seen < epoch).to(tl.int32), axis=0) > 0


@triton.jit
def await_flags(flags, epoch, failed, lost, limit_ns, RANKS: tl.constexpr, LANES: tl.constexpr):
    """Whether every rank has raised its flag [R] to `epoch`; gives up after the limit, or once `failed` is not 0.

    Whoever gives up first names the late ranks in `lost` [R] and sets `failed`, so that nobody waits a second time.
    """
    begin = nanoseconds()
    waited = begin - begin
    patient = _some_are_late(flags, epoch, RANKS, LANES)
    while patient:
        patient = _some_are_late(flags, epoch, RANKS, LANES)
        waited = nanoseconds() - begin
        patient = patient & (waited < limit_ns) & (tl.load(failed, volatile=True) == 0)
    lanes = tl.arange(0, LANES)
    present = lanes < RANKS
    seen = tl.atomic_add(flags + lanes, tl.zeros((LANES,), tl.int64), mask=present, sem="acquire", scope="sys")
    late = tl.sum(((seen < epoch) & present).to(tl.int32), axis=0)
    if (late > 0) & (waited >= limit_ns):
        tl.store(lost + lanes, 1, mask=present & (seen < epoch))
        tl.store(failed, 1)
    return late == 0


@triton.jit
def is_last(ticket, num_programs):
    """Whether all other programs of this launch have come here too; what they wrote is then visible to this one, and
    goes along with the flags that it raises. The ticket is 0 again for the next launch."""
    tl.debug_barrier()
    last = tl.atomic_add(ticket, 1, sem="acq_rel", scope="sys") == num_programs - 1
    if last:
        tl.store(ticket, 0)
    return last


@triton.jit
def raise_flags(peers, rank, offset, epoch, RANKS: tl.constexpr, LANES: tl.constexpr):
    """This rank has come to `epoch`: told to every rank, in its flags at byte `offset`."""
    lanes = tl.arange(0, LANES)
    present = lanes < RANKS
    flags = (tl.load(peers + lanes, mask=present, other=0) + offset + rank * 8).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(flags, tl.zeros((LANES,), tl.int64) + epoch, mask=present, sem="release", scope="sys")


def rank_constants(num_ranks: int) -> dict[str, int]:
    return {"RANKS": num_ranks, "LANES": triton.next_power_of_2(num_ranks)}
