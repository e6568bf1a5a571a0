"""Dispatch in Triton over symmetric memory: two launches.

    send:    writes a token's row once to every rank that has some of its experts, with its choices and their weights
    receive: waits for all ranks' tokens, then copies each row to its experts' rows; FP8 rows may be dequantized

Rows of an expert are ordered by rank, then by token: equal inputs give equal bits. No host synchronization; `send`
waits for nothing. Offsets are int64 whatever their value, so that launch sizes do not select the kernel. Legend: T
tokens, K experts per token, El experts of a rank, R ranks, M max tokens of a rank, C rows per expert, D hidden, N
programs.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from moe_engine.kernels.quantization.protocol import BLOCK
from moe_engine.kernels.quantization.triton_rows import quantize_tile
from moe_engine.kernels.symm_mem.tiles import SHAPES, TILES, CompiledShape
from moe_engine.kernels.symm_mem.triton_flags import all_have_arrived, is_last, part_of, raise_flags, rank_constants
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import announce_next, dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.grid_barrier import COOPERATIVE, grid_barrier

_BLOCK = tl.constexpr(BLOCK)
_SIZES = ["num_tokens", "rank", "max_tokens", "scale_stride", "limit_ns"]
_OFFSETS = ["sizes_at", "ids_at", "weights_at", "rows_at", "scales_at", "sent_at"]


@triton.jit(do_not_specialize=[*_SIZES, *_OFFSETS], do_not_specialize_on_alignment=["ids", "weights"])
def send_kernel(
    x, x_scales, ids, weights, targets, peers, state, failed,
    scale_stride, num_tokens, rank, max_tokens, sizes_at: tl.int64, ids_at: tl.int64, weights_at: tl.int64,
    rows_at: tl.int64, scales_at: tl.int64, sent_at: tl.int64,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr, NUM_LOCAL: tl.constexpr,
    RANKS: tl.constexpr, LANES: tl.constexpr, FP8: tl.constexpr, POWER_OF_TWO: tl.constexpr, CARRIES: tl.constexpr,
):  # fmt: skip
    """Program t sends token t of x [T, WIDTH]; targets [T, R]: 1 if the rank has a choice of the token. With FP8 the
    row is quantized on its way; CARRIES: x is bytes of e4m3 values, with scales x_scales [WIDTH / 128, T].

    Begins the slot's next epoch. Raises no flag after a timeout. Grid (max(T, 1),).
    """
    token = tl.program_id(0)
    live = token < num_tokens
    epoch = tl.load(state) + 1
    choice = tl.arange(0, CHOICES)
    named = choice < tl.where(live, TOP_K, 0)
    width = tl.where(live, WIDTH, 0)
    expert = tl.load(ids + token * TOP_K + choice, mask=named, other=-1)
    weight = tl.load(weights + token * TOP_K + choice, mask=named, other=0.0)
    line = (rank * max_tokens + token).to(tl.int64)
    if FP8:
        BLOCKS: tl.constexpr = WIDTH // _BLOCK
        block = tl.arange(0, COLS // _BLOCK)
        place = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        tile = tl.load(x + token.to(tl.int64) * WIDTH + place, mask=place < width, other=0)
        if CARRIES:
            numbers = tile
            scale = tl.load(x_scales + block * scale_stride + token, mask=block * _BLOCK < width, other=0.0)
        else:
            numbers, scale = quantize_tile(tile.to(tl.float32), POWER_OF_TWO)
    else:
        place = tl.arange(0, COLS)
        numbers = tl.load(x + token.to(tl.int64) * WIDTH + place, mask=place < width, other=0.0)
    for peer in range(RANKS):
        first = peer * NUM_LOCAL
        there = (expert >= first) & (expert < first + NUM_LOCAL)
        chosen = tl.minimum(tl.sum(there.to(tl.int32), axis=0), 1)
        to_send = width * chosen
        tl.store(targets + token * RANKS + peer, chosen, mask=live)
        choices = line * TOP_K + choice
        tl.store(part_of(peers, peer, ids_at, tl.int32) + choices, tl.where(there, expert - first, -1), mask=named)
        tl.store(part_of(peers, peer, weights_at, tl.float32) + choices, weight, mask=named & there)
        if FP8:
            scales = part_of(peers, peer, scales_at, tl.float32) + line * BLOCKS
            tl.store(scales + block, scale, mask=block * _BLOCK < to_send)
        if FP8 and not CARRIES:
            rows = part_of(peers, peer, rows_at, tl.float8e4nv)
        else:
            rows = part_of(peers, peer, rows_at, x.dtype.element_ty)
        tl.store(rows + line * WIDTH + place, numbers, mask=place < to_send)
        if token == 0:
            tl.store(part_of(peers, peer, sizes_at, tl.int32) + rank, num_tokens)
    if is_last(state + 1, tl.num_programs(0)):
        tl.store(state, epoch)
        if tl.load(failed, volatile=True) == 0:  # peers must not take missing rows for sent ones
            raise_flags(peers, rank, sent_at, epoch, RANKS, LANES)


@triton.jit
def _choices_of(ids, sizes, pair, end, most, max_tokens, TOP_K: tl.constexpr):
    """(experts of pairs, -1: none; their places in ids [R, M, K]); pair (source * most + token) * K + choice."""
    row = pair // TOP_K
    source, token = row // most, row % most
    real = (pair < end) & (token < tl.load(sizes + source, mask=pair < end, other=0))
    place = (source * max_tokens + token) * TOP_K + pair % TOP_K
    return tl.load(ids + place, mask=real, other=-1), place, real


@dependent_jit(do_not_specialize=[*_SIZES, *_OFFSETS])
def receive_kernel(
    peers, state, failed, lost, partial, positions, counts_out, out, out_scales,
    rank, max_tokens, scale_stride, limit_ns: tl.int64,
    sizes_at: tl.int64, ids_at: tl.int64, rows_at: tl.int64, scales_at: tl.int64, sent_at: tl.int64,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr, NUM_LOCAL: tl.constexpr, LOCAL: tl.constexpr,
    RANKS: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr, OTHERS: tl.constexpr, FP8: tl.constexpr,
    WIDEN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows of each expert: out [El, C, WIDTH] and counts_out [El]; positions [R * M, K]: the row of each choice, -1: of
    another rank, -2: one of more than C rows. FP8: the rows are e4m3, with out_scales [El, C, WIDTH / 128], or, with
    COLUMNS, [El, WIDTH / 128, scale_stride], the order in which DeepGEMM reads them. WIDEN: out is dequantized.

    partial: int32 [N, LOCAL], scratch. After a timeout all counts are 0. Cooperative, grid (N,).
    """
    wait_for_inputs(announce=False)
    program, programs = tl.program_id(0), tl.num_programs(0)
    complete = all_have_arrived(
        part_of(peers, rank, sent_at, tl.int64), state, state + 3, failed, lost, limit_ns, RANKS, LANES
    )
    ids, sizes = part_of(peers, rank, ids_at, tl.int32), part_of(peers, rank, sizes_at, tl.int32)
    lanes, experts, lane = tl.arange(0, LANES), tl.arange(0, LOCAL), tl.arange(0, STEP)
    most = tl.max(tl.load(sizes + lanes, mask=lanes < tl.where(complete, RANKS, 0), other=0), axis=0)
    each = tl.cdiv(RANKS * most, programs)
    first = tl.minimum(program * each, RANKS * most)
    last = tl.minimum(first + each, RANKS * most)
    total = tl.zeros((LOCAL,), tl.int32)
    for begin in range(first * TOP_K, last * TOP_K, STEP):
        chosen, _, _ = _choices_of(ids, sizes, begin + lane, last * TOP_K, most, max_tokens, TOP_K)
        total += tl.sum((chosen[:, None] == experts[None, :]).to(tl.int32), axis=0)
    tl.store(partial + program * LOCAL + experts, total)
    grid_barrier(state + 3)
    announce_next()
    total = tl.zeros((LOCAL,), tl.int32)
    start = tl.zeros((LOCAL,), tl.int32)
    for begin in range(0, programs, OTHERS):
        other = begin + tl.arange(0, OTHERS)
        counts = tl.load(partial + other[:, None] * LOCAL + experts[None, :], mask=(other < programs)[:, None], other=0)
        total += tl.sum(counts, axis=0)
        start += tl.sum(tl.where((other < program)[:, None], counts, 0), axis=0)
    capacity = RANKS * max_tokens
    if program == 0:
        tl.store(counts_out + experts, tl.minimum(total, capacity), mask=experts < NUM_LOCAL)
    for begin in range(first * TOP_K, last * TOP_K, STEP):
        chosen, place, real = _choices_of(ids, sizes, begin + lane, last * TOP_K, most, max_tokens, TOP_K)
        match = chosen[:, None] == experts[None, :]
        earlier = (chosen[:, None] == chosen[None, :]) & (lane[None, :] < lane[:, None])
        row = tl.sum(tl.where(match, start[None, :], 0), axis=1) + tl.sum(earlier.to(tl.int32), axis=1)
        fits = (chosen >= 0) & (row < capacity)
        row = tl.where(fits, chosen * capacity + row, tl.where(chosen >= 0, -2, -1))
        tl.store(positions + place, row, mask=real)
        start += tl.sum(match.to(tl.int32), axis=0)
    tl.debug_barrier()
    for index in range(first, last):
        source, token = index // most, index % most
        if token < tl.load(sizes + source):
            line = tl.cast(source * max_tokens + token, tl.int64)
            _copy_row(
                peers, rank, rows_at, scales_at, positions, out, out_scales, line, scale_stride, capacity,
                TOP_K, WIDTH, COLS, FP8, WIDEN, COLUMNS,
            )  # fmt: skip


@triton.jit
def _copy_row(
    peers, rank, rows_at, scales_at, positions, out, out_scales, line, scale_stride, capacity,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr, FP8: tl.constexpr, WIDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Row `line` of this rank's arrived rows to its experts' rows; not read without any."""
    most = tl.load(positions + line * TOP_K)
    for k in tl.static_range(1, TOP_K):
        most = tl.maximum(most, tl.load(positions + line * TOP_K + k))
    width = tl.where(most >= 0, WIDTH, 0)
    if FP8:
        BLOCKS: tl.constexpr = WIDTH // _BLOCK
        block = tl.arange(0, COLS // _BLOCK)
        place = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        scale = tl.load(
            part_of(peers, rank, scales_at, tl.float32) + line * BLOCKS + block, mask=block * _BLOCK < width, other=0.0
        )
        if WIDEN:
            rows = part_of(peers, rank, rows_at, tl.float8e4nv)
            tile = tl.load(rows + line * WIDTH + place, mask=place < width, other=0.0).to(tl.float32)
            tile = (tile * scale[:, None]).to(out.dtype.element_ty)
        else:
            rows = part_of(peers, rank, rows_at, tl.uint8)
            tile = tl.load(rows + line * WIDTH + place, mask=place < width, other=0)
    else:
        place = tl.arange(0, COLS)
        rows = part_of(peers, rank, rows_at, out.dtype.element_ty)
        tile = tl.load(rows + line * WIDTH + place, mask=place < width, other=0.0)
    for k in tl.static_range(TOP_K):
        row = tl.load(positions + line * TOP_K + k).to(tl.int64)
        inside = tl.where(row >= 0, WIDTH, 0)
        tl.store(out + row * WIDTH + place, tile, mask=place < inside)
        if FP8 and not WIDEN:
            if COLUMNS:
                scale_place = (row // capacity) * BLOCKS * scale_stride + row % capacity + block * scale_stride
            else:
                scale_place = row * BLOCKS + block
            tl.store(out_scales + scale_place, scale, mask=block * _BLOCK < inside)


def send_constants(
    top_k: int, hidden: int, num_local: int, num_ranks: int, fp8: bool, power_of_two: bool = False,
    carries: bool = False,
) -> dict[str, Any]:  # fmt: skip
    return {
        "TOP_K": top_k, "CHOICES": triton.next_power_of_2(top_k), "WIDTH": hidden, "COLS": row_columns(hidden),
        "NUM_LOCAL": num_local, **rank_constants(num_ranks), "FP8": fp8,
        "POWER_OF_TWO": power_of_two and not carries, "CARRIES": carries,
    }  # fmt: skip


def receive_constants(
    top_k: int, hidden: int, num_local: int, num_ranks: int, fp8: bool, widen: bool = False, columns: bool = False
) -> dict[str, Any]:  # fmt: skip
    local = triton.next_power_of_2(num_local)
    return {
        "TOP_K": top_k, "WIDTH": hidden, "COLS": row_columns(hidden), "NUM_LOCAL": num_local, "LOCAL": local,
        **rank_constants(num_ranks), "STEP": TILES.place_step, "OTHERS": max(1, TILES.place_counts // local),
        "FP8": fp8, "WIDEN": widen, "COLUMNS": columns,
    }  # fmt: skip


def row_columns(hidden: int) -> int:
    """Elements of a tile that holds a row: whole blocks, a power of two."""
    return max(BLOCK, triton.next_power_of_2(hidden))


def aot_cases() -> list[AotCase]:
    """Cases of the shapes in `tiles.SHAPES`."""
    return [case for shape in SHAPES for case in _cases_of(shape)]


def _cases_of(shape: CompiledShape) -> list[AotCase]:
    own = {"peers": "*i64", "state": "*i64", "failed": "*i64", "lost": "*i32"}
    sizes = dict.fromkeys(_SIZES[:-1], "i32") | {"limit_ns": "i64"} | dict.fromkeys(_OFFSETS, "i64")
    tensors = dict.fromkeys(("targets", "partial", "positions", "counts_out"), "*i32") | {"ids": "*i32:1"}
    tensors |= dict.fromkeys(("x", "out"), "*bf16") | {"weights": "*fp32:1", "x_scales": "*fp32"}
    arguments = own | sizes | tensors | {"out_scales": "*fp32"}
    sizes_of = (shape.top_k, shape.hidden, shape.num_local, shape.num_ranks, shape.fp8)
    none, found = {"x_scales": None}, []
    kernels = [(send_kernel, "send", send_constants(*sizes_of) | none)]
    widen = receive_constants(*sizes_of, widen=shape.fp8) | {"out_scales": None}
    kernels.append((receive_kernel, "receive", widen))
    if shape.fp8:
        kernels.append((send_kernel, "send_rows", send_constants(*sizes_of, carries=True)))
        kernels.append((receive_kernel, "receive_rows", receive_constants(*sizes_of, columns=True)))
    for kernel, name, constants in kernels:
        arguments |= {"x": "*u8", "out": "*u8"} if name.endswith("_rows") else {}
        names = [argument for argument in kernel.arg_names if argument not in constants]
        signature = {argument: arguments[argument] for argument in names}
        options = COOPERATIVE if kernel is receive_kernel else {}
        case = f"peer_{name}_{shape.name}"
        found.append(AotCase(case, kernel, signature, constants, TILES.row_warps, 3, False, options))
    return found
