"""All-reduce of rows in Triton over symmetric memory, alone or fused with residual add, RMSNorm and quantization.

    one_shot: sends each row to all ranks, waits for theirs, sums; the row may be the weighted sum of experts' rows
    two_shot: sends each row to one rank, which sums it (reduce-scatter) and sends the sum to all (all-gather)

A rank writes into its peers' memory and reads its own. Sums are float32, in rank order, rounded once to the rows'
dtype: both kernels give the same bits on every rank and for every number of rows.
Legend: T rows, R ranks, D hidden; a row is a tile [BLOCKS, 128].
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from moe_engine.kernels.permutation.triton_permute import weighted_sum
from moe_engine.kernels.quantization.protocol import BLOCK
from moe_engine.kernels.quantization.triton_rows import quantize_tile, store_scale
from moe_engine.kernels.symm_mem.all_reduce_layout import PROGRAMS, SHAPES, Arenas
from moe_engine.kernels.symm_mem.triton_flags import await_flags, part_of, raise_flags, rank_constants
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import announce_next, dependent_jit, wait_for_inputs

_BLOCK = tl.constexpr(BLOCK)
_UNSPECIALIZED = ["num_rows", "scale_stride", "rank", "limit_ns"]


@triton.jit
def _send(value, inside, peers, peer, half, rank, WIDTH: tl.constexpr, cols):
    """Writes a row to place `rank` of a half of `peer`'s arena."""
    rows = part_of(peers, peer, half, value.dtype)
    tl.store(rows + rank * WIDTH + cols, value, mask=inside)


@triton.jit
def _sum(rows, cols, inside, WIDTH: tl.constexpr, RANKS: tl.constexpr):
    """The sum of rows [R, WIDTH] in their dtype. Not through L1, where a line of an earlier epoch may be."""
    total = tl.load(rows + cols, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    for source in range(1, RANKS):
        row = tl.load(rows + source * WIDTH + cols, mask=inside, other=0.0, cache_modifier=".cg")
        total += row.to(tl.float32)
    return total.to(rows.dtype.element_ty)


@triton.jit
def _finish(
    summed, added_to, gains, residual, out, quantized, scales, row, cols, inside, scale_stride, eps,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, NORM: tl.constexpr, QUANTIZE: tl.constexpr, KEEP: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """Stores row `row` [WIDTH] of the result, as `rms_norm_quantize_kernel` does; without NORM the sum itself.

    added_to: the row of residual. gains: the norm's weight.
    """
    line = row.to(tl.int64) * WIDTH + cols
    if NORM:
        kind = summed.dtype
        rounded = (summed.to(tl.float32) + added_to.to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + line, rounded, mask=inside)
        value = rounded.to(tl.float32)
        mean = tl.sum(tl.sum(value * value, axis=1), axis=0) / WIDTH
        value = (value * tl.rsqrt(mean + eps)).to(kind).to(tl.float32)
        value *= gains.to(tl.float32)
        normed = value.to(kind)
        if KEEP:
            tl.store(out + line, normed, mask=inside)
        if QUANTIZE:
            blocks = tl.arange(0, BLOCKS)
            numbers, scale = quantize_tile(normed.to(tl.float32), POWER_OF_TWO)
            tl.store(quantized + line, numbers, mask=inside)
            written = (blocks * _BLOCK < WIDTH) & (tl.max(inside.to(tl.int32), axis=1) > 0)
            store_scale(scales, blocks, row, scale_stride, scale, written)
    else:
        tl.store(out + line, summed, mask=inside)


@dependent_jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=["router_weights"])
def one_shot_kernel(
    x, positions, router_weights, add, residual, weight, out, quantized, scales, peers, epochs, failed, lost,
    num_rows, scale_stride, rank, eps, limit_ns: tl.int64,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, PROGRAMS: tl.constexpr,
    ARENAS_AT: tl.constexpr, HALF_BYTES: tl.constexpr, NORM: tl.constexpr, QUANTIZE: tl.constexpr, KEEP: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, TOP_K: tl.constexpr, W_STRIDE: tl.constexpr, HAS_ADD: tl.constexpr,
):  # fmt: skip
    """x [T, WIDTH], partial sums -> their sum over the ranks, see `_finish`. Grid (<= PROGRAMS,). With TOP_K the
    partial sums are those of `combine_kernel` of x [M, WIDTH], by `positions` and `router_weights`.

    epochs int64 [2, PROGRAMS]: the epoch of each program; and 1 after a wait that ended early. Such a program sends
    nothing more: peers must not take rows of later epochs for earlier ones.
    """
    wait_for_inputs(announce=False)
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCKS)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside = cols < WIDTH
    epoch = tl.load(epochs + program)
    alive = tl.load(epochs + PROGRAMS + program) == 0
    flags_at = program.to(tl.int64) * (LANES * 8)
    for row in range(program, num_rows, tl.num_programs(0)):
        epoch += 1
        half = ARENAS_AT + (program * 2 + (epoch & 1)) * HALF_BYTES
        if TOP_K:
            total = weighted_sum(
                x, positions, router_weights, tl.cast(row, tl.int64), cols, TOP_K, WIDTH, W_STRIDE, True
            )
            if HAS_ADD:
                total += tl.load(add + tl.cast(row, tl.int64) * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
            value = total.to(x.dtype.element_ty)
        else:
            value = tl.load(x + tl.cast(row, tl.int64) * WIDTH + cols, mask=inside, other=0.0)
        added_to, gains = value, value
        if NORM:  # read before the wait
            added_to = tl.load(residual + tl.cast(row, tl.int64) * WIDTH + cols, mask=inside, other=0.0)
            gains = tl.load(weight + cols, mask=inside, other=0.0)
        if alive:
            for peer in range(RANKS):
                _send(value, inside, peers, peer, half, rank, WIDTH, cols)
            tl.debug_barrier()
            raise_flags(peers, rank, flags_at, epoch, RANKS, LANES)
        flags = part_of(peers, rank, flags_at, tl.int64)
        alive &= await_flags(flags, epoch, failed, lost, limit_ns, RANKS, LANES)
        if row + tl.num_programs(0) >= num_rows:  # the last wait
            announce_next()
        summed = _sum(part_of(peers, rank, half, x.dtype.element_ty), cols, inside, WIDTH, RANKS)
        _finish(
            summed, added_to, gains, residual, out, quantized, scales, tl.cast(row, tl.int32), cols, inside,
            scale_stride, eps, WIDTH, BLOCKS, NORM, QUANTIZE, KEEP, POWER_OF_TWO,
        )  # fmt: skip
    tl.debug_barrier()
    tl.store(epochs + program, epoch)
    tl.store(epochs + PROGRAMS + program, (~alive).to(tl.int64))


@dependent_jit(do_not_specialize=_UNSPECIALIZED)
def two_shot_kernel(
    x, residual, weight, out, quantized, scales, peers, epochs, failed, lost,
    num_rows, scale_stride, rank, eps, limit_ns: tl.int64,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, PROGRAMS: tl.constexpr,
    ARENAS_AT: tl.constexpr, HALF_BYTES: tl.constexpr, GATHERED_AT: tl.constexpr, GATHERED_FLAGS_AT: tl.constexpr,
    NORM: tl.constexpr, QUANTIZE: tl.constexpr, KEEP: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """`one_shot_kernel` in two exchanges: a program has groups of R rows, and rank r sums row r of each."""
    wait_for_inputs(announce=False)
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCKS)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    epoch = tl.load(epochs + program)
    alive = tl.load(epochs + PROGRAMS + program) == 0
    flags_at = program.to(tl.int64) * (LANES * 8)
    for group in range(program, tl.cdiv(num_rows, RANKS), tl.num_programs(0)):
        epoch += 1
        first = tl.cast(group, tl.int32) * RANKS
        half = ARENAS_AT + (program * 2 + (epoch & 1)) * HALF_BYTES
        if alive:
            for peer in range(RANKS):
                row = first + peer
                inside = cols < tl.where(row < num_rows, WIDTH, 0)
                value = tl.load(x + row.to(tl.int64) * WIDTH + cols, mask=inside, other=0.0)
                _send(value, inside, peers, peer, half, rank, WIDTH, cols)
            tl.debug_barrier()
            raise_flags(peers, rank, flags_at, epoch, RANKS, LANES)
        flags = part_of(peers, rank, flags_at, tl.int64)
        alive &= await_flags(flags, epoch, failed, lost, limit_ns, RANKS, LANES)
        inside = cols < tl.where(first + rank < num_rows, WIDTH, 0)
        summed = _sum(part_of(peers, rank, half, x.dtype.element_ty), cols, inside, WIDTH, RANKS)
        if alive:
            for peer in range(RANKS):
                _send(summed, inside, peers, peer, half + GATHERED_AT, rank, WIDTH, cols)
            tl.debug_barrier()
            raise_flags(peers, rank, flags_at + GATHERED_FLAGS_AT, epoch, RANKS, LANES)
        flags = part_of(peers, rank, flags_at + GATHERED_FLAGS_AT, tl.int64)
        alive &= await_flags(flags, epoch, failed, lost, limit_ns, RANKS, LANES)
        if (group + tl.num_programs(0)) * RANKS >= num_rows:  # the last wait
            announce_next()
        gathered = part_of(peers, rank, half + GATHERED_AT, x.dtype.element_ty)
        for source in range(RANKS):
            row = first + source
            inside = cols < tl.where(row < num_rows, WIDTH, 0)
            value = tl.load(gathered + source * WIDTH + cols, mask=inside, other=0.0, cache_modifier=".cg")
            added_to, gains = value, value
            if NORM:
                added_to = tl.load(residual + row.to(tl.int64) * WIDTH + cols, mask=inside, other=0.0)
                gains = tl.load(weight + cols, mask=inside, other=0.0)
            _finish(
                value, added_to, gains, residual, out, quantized, scales, row, cols, inside, scale_stride, eps,
                WIDTH, BLOCKS, NORM, QUANTIZE, KEEP, POWER_OF_TWO,
            )  # fmt: skip
    tl.debug_barrier()
    tl.store(epochs + program, epoch)
    tl.store(epochs + PROGRAMS + program, (~alive).to(tl.int64))


def constants_of(arenas: Arenas, one_shot: bool) -> dict[str, Any]:
    """Constants of either kernel, except those of the result's form."""
    found = {
        "WIDTH": arenas.width, "BLOCKS": triton.next_power_of_2(triton.cdiv(arenas.width, BLOCK)),
        **rank_constants(arenas.num_ranks), "LANES": arenas.lanes, "PROGRAMS": PROGRAMS, "ARENAS_AT": arenas.arenas_at,
        "HALF_BYTES": arenas.half_bytes,
    }  # fmt: skip
    more = {"GATHERED_AT": arenas.gathered_at, "GATHERED_FLAGS_AT": arenas.gathered_flags_at}
    return found if one_shot else found | more


def form_constants(norm: bool, quantize: bool, keep: bool, power_of_two: bool) -> dict[str, bool]:
    """Constants of the result's form."""
    return {"NORM": norm, "QUANTIZE": quantize, "KEEP": keep, "POWER_OF_TWO": power_of_two}


def rows_constants(top_k: int = 0, weights_stride: int = 0, has_add: bool = False) -> dict[str, Any]:
    """Constants of a one-shot launch that sums experts' rows first. top_k = 0: the rows are sums."""
    return {"TOP_K": top_k, "W_STRIDE": weights_stride, "HAS_ADD": has_add}


def warps_of(width: int) -> int:
    """About 16 elements of a row per thread."""
    return min(16, max(1, triton.next_power_of_2(triton.cdiv(width, BLOCK)) // 4))


_POINTERS = {
    "x": "*bf16", "residual": "*bf16", "weight": "*fp32", "out": "*bf16", "quantized": "*fp8e4nv", "scales": "*fp32",
    "peers": "*i64", "epochs": "*i64", "failed": "*i64", "lost": "*i32",
}  # fmt: skip
_ROWS = {"positions": "*i32", "router_weights": "*fp32:1"}
_FORMS: tuple[tuple[str, dict[str, bool], tuple[str, ...]], ...] = (
    ("sum", form_constants(False, False, True, False), ("residual", "weight", "quantized", "scales")),
    ("norm", form_constants(True, False, True, False), ("quantized", "scales")),
    ("quantize", form_constants(True, True, False, False), ("out",)),
    ("quantize_keep", form_constants(True, True, True, False), ()),
)


def aot_cases() -> list[AotCase]:
    """Both kernels in every form of the result; one-shot with a norm also of experts' rows."""
    sizes = {"num_rows": "i32", "scale_stride": "i32", "rank": "i32", "eps": "fp32", "limit_ns": "i64"}
    found = []
    for shape in SHAPES:
        arenas = Arenas(shape.num_ranks, shape.width, 2)
        plain = rows_constants() | dict.fromkeys((*_ROWS, "add"))
        of_rows = rows_constants(shape.top_k, shape.top_k) | {"add": None}
        for form, constants, absent in _FORMS:
            kinds = {name: kind for name, kind in (_POINTERS | sizes).items() if name not in absent}
            for kernel, name, more, rows in (
                (one_shot_kernel, "one_shot", {}, plain), (one_shot_kernel, "one_shot_rows", _ROWS, of_rows),
                (two_shot_kernel, "two_shot", {}, {}),
            ):  # fmt: skip
                never = shape.num_ranks == 2 if name == "two_shot" else name == "one_shot_rows" and form == "sum"
                if never:
                    continue
                fixed = constants_of(arenas, name != "two_shot") | constants | dict.fromkeys(absent) | rows
                case = f"all_reduce_{name}_{form}_{shape.name}"
                found.append(AotCase(case, kernel, kinds | more, fixed, warps_of(shape.width), 3, False))
    return found
