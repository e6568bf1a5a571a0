"""Flags between ranks, in Triton: raised with release semantics, awaited with acquire and a timeout.

A flag is an int64 in the waiting rank's memory that counts its writer's epochs of a slot: flags are never reset, so a
captured graph can be replayed indefinitely. All writes of a rank before it raises a flag are visible to a rank that has
read the flag. Source: PTX ISA, "Memory consistency model" (release and acquire patterns at system scope are cumulative
over barriers of a block and over the tickets below).
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_engine.kernels.triton.grid_barrier import grid_barrier, pause


@triton.jit
def part_of(peers, rank, offset, ELEMENT: tl.constexpr):
    """Pointer to byte `offset` of a rank's memory, in this rank's address space. Regions are aligned; the compiler
    needs this hint: otherwise it would copy element by element."""
    return tl.multiple_of((tl.load(peers + rank) + offset).to(tl.pointer_type(ELEMENT)), 16)


@triton.jit
def nanoseconds():
    """The GPU's clock, int64; it ticks about every microsecond."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _some_are_late(flags, epoch, patient, RANKS: tl.constexpr, LANES: tl.constexpr):
    """Plain volatile loads: many programs poll the same flags, and atomics would slow the rank that raises them. False
    unless `patient`, a condition that threads see at different times: the sum over lanes of several warps is a barrier
    of all of them, so that they must leave a loop together."""
    lanes = tl.arange(0, LANES)
    seen = tl.load(flags + lanes, mask=lanes < RANKS, other=epoch, volatile=True)
    return tl.sum(((seen < epoch) & patient).to(tl.int32), axis=0) > 0


@triton.jit
def await_flags(flags, epoch, failed, lost, limit_ns, RANKS: tl.constexpr, LANES: tl.constexpr):
    """True if every rank has raised its flag [R] to `epoch`; gives up after the limit, or once `failed` is not 0.

    The first program to give up marks the late ranks in `lost` [R] and sets `failed`, so that later waits end
    immediately."""
    begin = nanoseconds()
    waited = begin - begin
    late = _some_are_late(flags, epoch, waited == 0, RANKS, LANES)
    while late:
        pause()
        waited = nanoseconds() - begin
        patient = (waited < limit_ns) & (tl.load(failed, volatile=True) == 0)
        late = _some_are_late(flags, epoch, patient, RANKS, LANES)
    lanes = tl.arange(0, LANES)
    present = lanes < RANKS
    seen = tl.atomic_add(flags + lanes, tl.zeros((LANES,), tl.int64), mask=present, sem="acquire", scope="sys")
    missing = present & (seen < epoch)
    if tl.sum((missing & (waited >= limit_ns)).to(tl.int32), axis=0) > 0:
        tl.store(lost + lanes, 1, mask=missing)
        tl.store(failed, 1)
    return tl.sum(missing.to(tl.int32), axis=0) == 0


@triton.jit
def all_have_arrived(
    flags, state, barrier, failed, lost, limit_ns, RANKS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """`await_flags` of the slot's epoch by one program, for all programs of a cooperative launch: the others wait for
    that one, on this device. False after any timeout."""
    if tl.program_id(0) == 0:
        await_flags(flags, tl.load(state), failed, lost, limit_ns, RANKS, LANES)
    grid_barrier(barrier)
    return tl.load(failed, volatile=True) == 0


@triton.jit
def is_last(ticket, num_programs):
    """True if all other programs of this launch have arrived; their writes are then visible to this program and covered
    by the flags it raises. Resets the ticket to 0 for the next launch."""
    tl.debug_barrier()
    last = tl.atomic_add(ticket, 1, sem="acq_rel", scope="sys") == num_programs - 1
    if last:
        tl.store(ticket, 0)
    return last


@triton.jit
def raise_flags(peers, rank, offset, epoch, RANKS: tl.constexpr, LANES: tl.constexpr):
    """Writes this rank's `epoch` to the flags at byte `offset` of every rank."""
    lanes = tl.arange(0, LANES)
    present = lanes < RANKS
    flags = (tl.load(peers + lanes, mask=present, other=0) + offset + rank * 8).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(flags, tl.zeros((LANES,), tl.int64) + epoch, mask=present, sem="release", scope="sys")


def rank_constants(num_ranks: int) -> dict[str, int]:
    return {"RANKS": num_ranks, "LANES": triton.next_power_of_2(num_ranks)}
