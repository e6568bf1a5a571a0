"""Dispatch in Triton over symmetric memory: three launches, and no copy on arrival.

    notify:  sends this rank's row counts per expert to every rank
    send:    from all counts a rank computes the position of its rows at each expert and writes them there
    receive: waits for the rows, sums the counts; FP8 rows may be dequantized

Rows of an expert are ordered by rank, then by token: equal inputs give equal bits. No host synchronisation; `send`
waits for the counts of all ranks, `receive` for their rows. Offsets are int64 whatever their value, so that launch
sizes do not select the kernel. Legend: T tokens, K experts per token, P = T * K pairs (token, choice), E experts over
all ranks, El of a rank, R ranks, C rows per expert, D hidden.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from moe_engine.kernels.quantization.protocol import BLOCK
from moe_engine.kernels.quantization.triton_rows import quantize_tile
from moe_engine.kernels.symm_mem.tiles import SHAPES, TILES, CompiledShape
from moe_engine.kernels.symm_mem.triton_flags import await_flags, is_last, part_of, raise_flags, rank_constants
from moe_engine.kernels.triton.aot import AotCase

_BLOCK = tl.constexpr(BLOCK)
_SCALE_ROWS = tl.constexpr(16)
_SIZES = ["num_pairs", "rank", "capacity", "max_pairs", "scale_stride", "limit_ns"]
_OFFSETS = ["counts_at", "counted_at", "sent_at", "origins_at", "rows_at", "scales_at"]


@triton.jit(do_not_specialize=[*_SIZES, *_OFFSETS], do_not_specialize_on_alignment=["ids"])
def notify_kernel(
    ids, peers, state, numbers, num_pairs, rank, counts_at: tl.int64, counted_at: tl.int64,
    NUM_LOCAL: tl.constexpr, LOCAL: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Program d counts the pairs for the experts of rank d and indexes them within their expert: numbers [P].

    Begins the slot's next epoch. Grid (R,).
    """
    first = tl.program_id(0) * NUM_LOCAL
    experts = tl.arange(0, LOCAL)
    lane = tl.arange(0, STEP)
    epoch = tl.load(state) + 1
    total = tl.zeros((LOCAL,), tl.int32)
    for begin in range(0, num_pairs, STEP):
        pairs = begin + lane
        chosen = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1) - first
        here = (chosen >= 0) & (chosen < NUM_LOCAL)
        named = (chosen[:, None] == experts[None, :]) & here[:, None]
        earlier = (chosen[:, None] == chosen[None, :]) & (lane[None, :] < lane[:, None])
        place = tl.sum(tl.where(named, total[None, :], 0), axis=1) + tl.sum(earlier.to(tl.int32), axis=1)
        tl.store(numbers + pairs, place, mask=here)
        total += tl.sum(named.to(tl.int32), axis=0)
    for peer in range(RANKS):
        counts = part_of(peers, peer, counts_at, tl.int32)
        tl.store(counts + rank * (RANKS * NUM_LOCAL) + first + experts, total, mask=experts < NUM_LOCAL)
    if is_last(state + 1, RANKS):
        tl.store(state, epoch)
        raise_flags(peers, rank, counted_at, epoch, RANKS, LANES)


@triton.jit
def _write_row(
    x, x_scales, row, scales, scale_stride,
    WIDTH: tl.constexpr, COLS: tl.constexpr, FP8: tl.constexpr, POWER_OF_TWO: tl.constexpr, CARRIES: tl.constexpr,
):  # fmt: skip
    """Copies x [WIDTH] to row [WIDTH], possibly of another rank; with FP8 quantized in the same pass, scales
    [WIDTH / 128]. CARRIES: x is already quantized, with scales `scale_stride` apart."""
    if FP8:
        blocks = tl.arange(0, COLS)
        places = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        for begin in range(0, WIDTH, COLS * _BLOCK):
            inside = begin + places < WIDTH
            some = begin + blocks * _BLOCK < WIDTH
            tile = tl.load(x + begin + places, mask=inside, other=0)
            if CARRIES:
                numbers = tile
                scale = tl.load(x_scales + (begin // _BLOCK + blocks) * scale_stride, mask=some)
            else:
                numbers, scale = quantize_tile(tile.to(tl.float32), POWER_OF_TWO)
            tl.store(row + begin + places, numbers, mask=inside)
            tl.store(scales + begin // _BLOCK + blocks, scale, mask=some)
    else:
        for begin in range(0, WIDTH, COLS):
            places = begin + tl.arange(0, COLS)
            tl.store(row + places, tl.load(x + places, mask=places < WIDTH), mask=places < WIDTH)


@triton.jit(do_not_specialize=[*_SIZES, *_OFFSETS], do_not_specialize_on_alignment=["ids"])
def send_kernel(
    x, x_scales, ids, numbers, positions, peers, state, failed, lost,
    scale_stride, num_pairs, rank, capacity, max_pairs, limit_ns: tl.int64, counts_at: tl.int64, counted_at: tl.int64,
    sent_at: tl.int64, origins_at: tl.int64, rows_at: tl.int64, scales_at: tl.int64,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, NUM_LOCAL: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr,
    COLS: tl.constexpr, FP8: tl.constexpr, POWER_OF_TWO: tl.constexpr, CARRIES: tl.constexpr,
):  # fmt: skip
    """Program p writes pair p's row of x [T, WIDTH] to its expert; positions [P] receives the expert's row index, -1 if
    not sent: no such expert, or more than C rows. CARRIES: x is bytes of e4m3 values, with scales x_scales
    [WIDTH / 128, T]. Grid (max(P, 1),)."""
    pair = tl.program_id(0)
    epoch = tl.load(state)
    flags = part_of(peers, rank, counted_at, tl.int64)
    complete = await_flags(flags, epoch, failed, lost, limit_ns, RANKS, LANES)
    inside = pair < num_pairs
    expert = tl.load(ids + pair, mask=inside, other=-1)
    known = (expert >= 0) & (expert < RANKS * NUM_LOCAL) & complete
    expert = tl.where(known, expert, 0)
    owner = expert // NUM_LOCAL
    counts = part_of(peers, rank, counts_at, tl.int32)
    lanes = tl.arange(0, LANES)
    earlier = lanes < tl.where(known, rank, 0)
    before = tl.load(counts + lanes * (RANKS * NUM_LOCAL) + expert, mask=earlier, other=0)
    place = tl.sum(before, axis=0) + tl.load(numbers + pair, mask=known, other=0)
    fits = known & (place < capacity)
    tl.store(positions + pair, tl.where(fits, place, -1), mask=inside)
    if fits:
        number = (expert - owner * NUM_LOCAL) * capacity + place
        origins = part_of(peers, owner, origins_at, tl.int32)
        tl.store(origins + number, rank * max_pairs + pair)
        line = number.to(tl.int64)
        if FP8 and not CARRIES:
            rows = part_of(peers, owner, rows_at, tl.float8e4nv)
        else:
            rows = part_of(peers, owner, rows_at, x.dtype.element_ty)
        scales = part_of(peers, owner, scales_at, tl.float32) + line * (WIDTH // _BLOCK)
        token = pair // TOP_K
        token_scales = x_scales
        if CARRIES:
            token_scales += token
        _write_row(
            x + token.to(tl.int64) * WIDTH, token_scales, rows + line * WIDTH, scales, scale_stride,
            WIDTH, COLS, FP8, POWER_OF_TWO, CARRIES,
        )  # fmt: skip
    # no flag after a timeout of any program: peers must not take missing rows for sent ones
    if is_last(state + 2, tl.num_programs(0)) & complete & (tl.load(failed, volatile=True) == 0):
        raise_flags(peers, rank, sent_at, epoch, RANKS, LANES)


@triton.jit(do_not_specialize=[*_SIZES, *_OFFSETS])
def receive_kernel(
    peers, state, failed, lost, counts_out, out, columns, rank, capacity, scale_stride,
    limit_ns: tl.int64, counts_at: tl.int64, sent_at: tl.int64, rows_at: tl.int64, scales_at: tl.int64,
    WIDTH: tl.constexpr, NUM_LOCAL: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
    FP8: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """counts_out [El]: rows received per expert; with FP8 they are dequantized into out [El, C, WIDTH]. With COLUMNS
    their scales are copied to columns [El, WIDTH / 128, scale_stride], the order in which DeepGEMM reads them.

    After a timeout all counts are 0. Grid (El, programs per expert).
    """
    expert, part = tl.program_id(0), tl.program_id(1)
    flags = part_of(peers, rank, sent_at, tl.int64)
    complete = await_flags(flags, tl.load(state), failed, lost, limit_ns, RANKS, LANES)
    counts = part_of(peers, rank, counts_at, tl.int32) + rank * NUM_LOCAL + expert
    lanes = tl.arange(0, LANES)
    arrived = lanes < tl.where(complete, RANKS, 0)
    sizes = tl.load(counts + lanes * (RANKS * NUM_LOCAL), mask=arrived, other=0)
    count = tl.minimum(tl.sum(sizes, axis=0), capacity)
    tl.store(counts_out + expert, count, mask=part == 0)
    if COLUMNS:
        BLOCKS: tl.constexpr = WIDTH // _BLOCK
        source = part_of(peers, rank, scales_at, tl.float32) + expert.to(tl.int64) * capacity * BLOCKS
        target = columns + expert.to(tl.int64) * BLOCKS * scale_stride
        block = tl.arange(0, COLS)[None, :]
        for begin in range(part * _SCALE_ROWS, count, tl.num_programs(1) * _SCALE_ROWS):
            line = begin + tl.arange(0, _SCALE_ROWS)[:, None]
            inside = (line < count) & (block < BLOCKS)
            tl.store(target + block * scale_stride + line, tl.load(source + line * BLOCKS + block, mask=inside), inside)
    if FP8:
        rows = part_of(peers, rank, rows_at, tl.float8e4nv)
        scales = part_of(peers, rank, scales_at, tl.float32)
        blocks = tl.arange(0, COLS)
        places = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        for row in range(part, count, tl.num_programs(1)):
            line = (expert * capacity + row).to(tl.int64)
            for begin in range(0, WIDTH, COLS * _BLOCK):
                inside = begin + places < WIDTH
                tile = tl.load(rows + line * WIDTH + begin + places, mask=inside, other=0.0).to(tl.float32)
                of_blocks = scales + line * (WIDTH // _BLOCK) + begin // _BLOCK + blocks
                tile *= tl.load(of_blocks, mask=begin + blocks * _BLOCK < WIDTH, other=0.0)[:, None]
                tl.store(out + line * WIDTH + begin + places, tile.to(out.dtype.element_ty), mask=inside)


def notify_constants(num_local: int, num_ranks: int) -> dict[str, Any]:
    local = triton.next_power_of_2(num_local)
    return {"NUM_LOCAL": num_local, "LOCAL": local, **rank_constants(num_ranks), "STEP": TILES.notify_step}


def send_constants(
    top_k: int, hidden: int, num_local: int, num_ranks: int, fp8: bool, power_of_two: bool = False,
    carries: bool = False,
) -> dict[str, Any]:  # fmt: skip
    how = {"POWER_OF_TWO": power_of_two and not carries, "CARRIES": carries}
    constants = receive_constants(hidden, num_local, num_ranks, fp8)
    del constants["COLUMNS"]
    return {"TOP_K": top_k, **constants, **how}


def receive_constants(
    hidden: int, num_local: int, num_ranks: int, fp8: bool, columns: bool = False
) -> dict[str, Any]:  # fmt: skip
    cols = triton.next_power_of_2(hidden // BLOCK) if columns else TILES.row_blocks if fp8 else TILES.row_cols
    constants = {"WIDTH": hidden, "NUM_LOCAL": num_local, **rank_constants(num_ranks), "COLS": cols, "FP8": fp8}
    return constants | {"COLUMNS": columns}


def aot_cases() -> list[AotCase]:
    """Cases of the shapes in `tiles.SHAPES`."""
    return [case for shape in SHAPES for case in _cases_of(shape)]


def _cases_of(shape: CompiledShape) -> list[AotCase]:
    own = {"peers": "*i64", "state": "*i64", "failed": "*i64", "lost": "*i32"}
    sizes = dict.fromkeys(_SIZES[:-1], "i32") | {"limit_ns": "i64"} | dict.fromkeys(_OFFSETS, "i64")
    tensors = dict.fromkeys(("numbers", "positions", "counts_out"), "*i32") | {"ids": "*i32:1"}
    tensors |= dict.fromkeys(("x", "out"), "*bf16") | {"columns": "*fp32"}
    arguments = own | sizes | tensors
    sizes_of = (shape.hidden, shape.num_local, shape.num_ranks, shape.fp8)
    found = []
    kernels = [
        (notify_kernel, "notify", notify_constants(shape.num_local, shape.num_ranks), TILES.notify_warps),
        (send_kernel, "send", send_constants(shape.top_k, *sizes_of) | {"x_scales": None}, TILES.row_warps),
        (receive_kernel, "receive", receive_constants(*sizes_of) | {"columns": None}, TILES.row_warps),
    ]
    if shape.fp8:
        carries = send_constants(shape.top_k, *sizes_of, carries=True)
        kernels.append((send_kernel, "send_rows", carries, TILES.row_warps))
        columns = receive_constants(shape.hidden, shape.num_local, shape.num_ranks, False, columns=True)
        kernels.append((receive_kernel, "receive_rows", columns, TILES.row_warps))
    for kernel, name, constants, warps in kernels:
        arguments |= {"x": "*u8", "x_scales": "*fp32"} if name == "send_rows" else {}
        names = [argument for argument in kernel.arg_names if argument not in constants]
        signature = {argument: arguments[argument] for argument in names}
        found.append(AotCase(f"peer_{name}_{shape.name}", kernel, signature, constants, warps, 3, False))
    return found
