"""Combine in Triton over symmetric memory: a rank sums its experts' results of a token and sends the sum.

    combine_send: the weighted sum of a token's results on this rank, in float32, in choice order, is written once to
                  the token's rank: [R, M, D]
    sum:          waits for all ranks, then the sum over the ranks, in float32, in rank order

Legend: T tokens, K experts per token, M max tokens of a rank, El experts of a rank, R ranks, C rows per expert,
D hidden.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from moe_engine.kernels.symm_mem.tiles import SHAPES, TILES
from moe_engine.kernels.symm_mem.triton_flags import (
    all_have_arrived,
    is_last,
    part_of,
    raise_flags,
    rank_constants,
)
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import announce_next, dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.grid_barrier import COOPERATIVE

_SIZES = ["rank", "max_tokens", "limit_ns", "num_tokens"]
_OFFSETS = ["sizes_at", "weights_at", "returned_at", "flags_at"]


@triton.jit(do_not_specialize=[*_SIZES, *_OFFSETS])
def combine_send_kernel(
    rows, positions, peers, state, failed, rank, max_tokens,
    sizes_at: tl.int64, weights_at: tl.int64, returned_at: tl.int64, flags_at: tl.int64,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Sums rows [El, C, WIDTH] of each arrived token with a choice here, by positions [R * M, K].

    Raises no flag after a timeout: peers must not take missing rows for sent ones. Any one-dimensional grid.
    """
    programs = tl.num_programs(0)
    complete = tl.load(failed, volatile=True) == 0
    sizes = part_of(peers, rank, sizes_at, tl.int32)
    weights = part_of(peers, rank, weights_at, tl.float32)
    lanes, cols = tl.arange(0, LANES), tl.arange(0, COLS)
    most = tl.max(tl.load(sizes + lanes, mask=lanes < tl.where(complete, RANKS, 0), other=0), axis=0)
    for index in range(tl.program_id(0), RANKS * most, programs):
        source, token = index // most, index % most
        line = tl.cast(source * max_tokens + token, tl.int64)
        real = token < tl.load(sizes + source)
        total = tl.zeros((COLS,), tl.float32)
        here = token - token  # choices on this rank
        for k in tl.static_range(TOP_K):
            row = tl.load(positions + line * TOP_K + k, mask=real, other=-1).to(tl.int64)
            weight = tl.load(weights + line * TOP_K + k, mask=row >= 0, other=0.0)
            width = tl.where(row >= 0, WIDTH, 0)
            total += weight * tl.load(rows + row * WIDTH + cols, mask=cols < width, other=0.0).to(tl.float32)
            here += (row != -1).to(tl.int32)
        returned = part_of(peers, source, returned_at, rows.dtype.element_ty)
        place = returned + (tl.cast(rank, tl.int64) * max_tokens + token) * WIDTH + cols
        tl.store(place, total.to(rows.dtype.element_ty), mask=cols < tl.where(here > 0, WIDTH, 0))
    if is_last(state + 2, programs) & (tl.load(failed, volatile=True) == 0):
        raise_flags(peers, rank, flags_at, tl.load(state), RANKS, LANES)


@dependent_jit(do_not_specialize=[*_SIZES, *_OFFSETS])
def sum_kernel(
    targets, out, peers, state, failed, lost, num_tokens, rank, max_tokens,
    limit_ns: tl.int64, returned_at: tl.int64, flags_at: tl.int64,
    WIDTH: tl.constexpr, COLS: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """out [T, WIDTH] = the sum of returned [R, M, WIDTH] over the token's ranks, targets [T, R].

    Zeros after a timeout. Cooperative, any one-dimensional grid: a rank without tokens waits too, since its next
    launches require that all other ranks have reached this point.
    """
    wait_for_inputs(announce=False)
    complete = all_have_arrived(
        part_of(peers, rank, flags_at, tl.int64), state, state + 4, failed, lost, limit_ns, RANKS, LANES
    )
    announce_next()
    returned = part_of(peers, rank, returned_at, out.dtype.element_ty)
    cols = tl.arange(0, COLS)
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        total = tl.zeros((COLS,), tl.float32)
        for source in tl.static_range(RANKS):
            sent = tl.load(targets + token * RANKS + source) * complete.to(tl.int32)
            row = returned + (tl.cast(source * max_tokens + token, tl.int64)) * WIDTH
            total += tl.load(row + cols, mask=cols < sent * WIDTH, other=0.0).to(tl.float32)
        place = out + tl.cast(token, tl.int64) * WIDTH + cols
        tl.store(place, total.to(out.dtype.element_ty), mask=cols < WIDTH)


def combine_send_constants(top_k: int, hidden: int, num_ranks: int) -> dict[str, Any]:
    return {"TOP_K": top_k, **sum_constants(hidden, num_ranks)}


def sum_constants(hidden: int, num_ranks: int) -> dict[str, Any]:
    return {"WIDTH": hidden, "COLS": triton.next_power_of_2(hidden), **rank_constants(num_ranks)}


def aot_cases() -> list[AotCase]:
    """Cases of the shapes in `tiles.SHAPES`; combine is bf16 for any dispatch dtype."""
    own = {"peers": "*i64", "state": "*i64", "failed": "*i64", "lost": "*i32", "limit_ns": "i64"}
    arguments = own | dict.fromkeys(("rank", "max_tokens", "num_tokens"), "i32") | dict.fromkeys(_OFFSETS, "i64")
    arguments |= {"rows": "*bf16", "positions": "*i32", "targets": "*i32", "out": "*bf16"}
    found = []
    for shape in (shape for shape in SHAPES if not shape.fp8):
        size = shape.hidden, shape.num_ranks
        for kernel, name, constants, options in (
            (combine_send_kernel, "combine_send", combine_send_constants(shape.top_k, *size), {}),
            (sum_kernel, "sum", sum_constants(*size), COOPERATIVE),
        ):
            names = [argument for argument in kernel.arg_names if argument not in constants]
            signature = {argument: arguments[argument] for argument in names}
            case = f"peer_{name}_{shape.name}"
            found.append(AotCase(case, kernel, signature, constants, TILES.row_warps, 3, False, options))
    return found
