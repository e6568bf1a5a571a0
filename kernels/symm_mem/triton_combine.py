"""Combine in Triton over symmetric memory: results are sent to the tokens' ranks and summed there.

    combine_send: writes every result to its token's rank: [M * K, D], one row per pair
    sum:          waits for all ranks, then the weighted sum of a token's results, in float32, in choice order

Legend: T tokens, K experts per token, M max tokens of a rank, El experts of a rank, R ranks, C rows per expert.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from moe_engine.kernels.symm_mem.tiles import SHAPES, TILES
from moe_engine.kernels.symm_mem.triton_flags import await_flags, is_last, part_of, raise_flags, rank_constants
from moe_engine.kernels.triton.aot import AotCase

_SIZES = ["rank", "capacity", "max_pairs", "limit_ns", "num_tokens"]
_OFFSETS = ["origins_at", "returned_at", "flags_at"]


@triton.jit(do_not_specialize=[*_SIZES, *_OFFSETS])
def combine_send_kernel(
    rows, counts, peers, state, failed, rank, capacity, max_pairs,
    origins_at: tl.int64, returned_at: tl.int64, flags_at: tl.int64,
    WIDTH: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Sends rows [El, C, WIDTH], the first counts [El] of each expert, to the ranks in the slot's origins.

    Raises no flag after a timeout: peers must not take missing rows for sent ones. Grid (El, programs per expert).
    """
    expert, part = tl.program_id(0), tl.program_id(1)
    origins = part_of(peers, rank, origins_at, tl.int32)
    for row in range(part, tl.load(counts + expert), tl.num_programs(1)):
        number = expert * capacity + row
        origin = tl.load(origins + number)
        source = origin // max_pairs
        returned = part_of(peers, source, returned_at, rows.dtype.element_ty)
        target = returned + (origin - source * max_pairs).to(tl.int64) * WIDTH
        result = rows + number.to(tl.int64) * WIDTH
        for begin in range(0, WIDTH, COLS):
            places = begin + tl.arange(0, COLS)
            tl.store(target + places, tl.load(result + places, mask=places < WIDTH), mask=places < WIDTH)
    if is_last(state + 3, tl.num_programs(0) * tl.num_programs(1)) & (tl.load(failed) == 0):
        raise_flags(peers, rank, flags_at, tl.load(state), RANKS, LANES)


@triton.jit(do_not_specialize=[*_SIZES, *_OFFSETS], do_not_specialize_on_alignment=["weights"])
def sum_kernel(
    positions, weights, out, peers, state, failed, lost, num_tokens, rank,
    limit_ns: tl.int64, returned_at: tl.int64, flags_at: tl.int64,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """out [T, WIDTH] = sum_k weights[t, k] * returned[t, k] over sent choices (positions [T, K] >= 0).

    Zeros after a timeout. Grid (max(T, 1), WIDTH / COLS): a rank without tokens waits too, since its next launches
    require that all other ranks have reached this point.
    """
    token = tl.program_id(0)
    flags = part_of(peers, rank, flags_at, tl.int64)
    complete = await_flags(flags, tl.load(state), failed, lost, limit_ns, RANKS, LANES)
    inside = token < num_tokens
    returned = part_of(peers, rank, returned_at, out.dtype.element_ty)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros((COLS,), tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        sent = (tl.load(positions + pair, mask=inside, other=-1) >= 0) & complete
        weight = tl.load(weights + pair, mask=sent, other=0.0)
        width = tl.where(sent, WIDTH, 0)
        value = tl.load(returned + pair.to(tl.int64) * WIDTH + cols, mask=cols < width, other=0.0)
        total += weight * value.to(tl.float32)
    place = out + token.to(tl.int64) * WIDTH + cols
    tl.store(place, total.to(out.dtype.element_ty), mask=cols < tl.where(inside, WIDTH, 0))


def combine_send_constants(hidden: int, num_ranks: int) -> dict[str, Any]:
    return {"WIDTH": hidden, **rank_constants(num_ranks), "COLS": TILES.row_cols}


def sum_constants(top_k: int, hidden: int, num_ranks: int) -> dict[str, Any]:
    return {"TOP_K": top_k, "WIDTH": hidden, **rank_constants(num_ranks), "COLS": TILES.sum_cols}


def aot_cases() -> list[AotCase]:
    """Cases of the shapes in `tiles.SHAPES`; combine is bf16 for any dispatch dtype."""
    own = {"peers": "*i64", "state": "*i64", "failed": "*i64", "lost": "*i32", "limit_ns": "i64"}
    arguments = own | dict.fromkeys(_SIZES[:3], "i32") | {"num_tokens": "i32"} | dict.fromkeys(_OFFSETS, "i64")
    arguments |= {"rows": "*bf16", "counts": "*i32", "positions": "*i32", "weights": "*fp32:1", "out": "*bf16"}
    found = []
    for shape in (shape for shape in SHAPES if not shape.fp8):
        size = shape.hidden, shape.num_ranks
        for kernel, name, constants, warps in (
            (combine_send_kernel, "combine_send", combine_send_constants(*size), TILES.row_warps),
            (sum_kernel, "sum", sum_constants(shape.top_k, *size), TILES.sum_warps),
        ):
            names = [argument for argument in kernel.arg_names if argument not in constants]
            signature = {argument: arguments[argument] for argument in names}
            found.append(AotCase(f"peer_{name}_{shape.name}", kernel, signature, constants, warps, 3, False))
    return found
