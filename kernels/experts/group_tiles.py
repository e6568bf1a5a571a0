"""Tiles of a grouped product: their number and places from row counts on the device, and the programs that share them.

Legend: E experts, M rows, N columns of the result. A tile is BLOCK_M rows of one expert x BLOCK_N columns.

Row counts are known only on the device, so a grid of one program per tile would have to cover the worst case, and most
of its programs would find nothing to do. The grid instead has at most as many programs as the device holds at once, and
each takes every further tile of their number (the scheme of CUTLASS' persistent kernels).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_engine.kernels.linear.products import grouped_order
from moe_engine.kernels.linear.tiles import Tiles
from moe_engine.kernels.triton.grid_barrier import resident_programs

SHARED_BYTES = 227 << 10
"""Shared memory of an SM for programs, H100 to B200: 228 KiB, 1 KiB of it the system's. Source: CUDA C programming
guide, technical specifications per compute capability."""

THREADS = 2048
"""Maximum threads of an SM. Same source."""


def programs_per_sm(stage_bytes: int, num_stages: int, num_warps: int) -> int:
    """Programs that an SM holds at once, by shared memory and threads: rather too many, since registers are unknown
    here. A program too many waits for a place; one too few leaves a place empty.

    Args:
        stage_bytes: operands of one step of K. The compiler buffers at least `num_stages` - 1 steps.
    """
    fit = SHARED_BYTES // (stage_bytes * max(1, num_stages - 1))
    return max(1, min(fit, THREADS // (32 * num_warps)))


def num_programs(most: int, tiles: Tiles, weight_rows: int, block_k: int, item_bytes: int, device: torch.device) -> int:
    """Programs of a launch.

    Args:
        most: tiles in the worst case.
        weight_rows: rows of weights that a tile reads in a step.
    """
    stage = (tiles.block_m + weight_rows) * block_k * item_bytes
    return min(most, resident_programs(device) * programs_per_sm(stage, tiles.num_stages, tiles.num_warps))


@triton.jit
def expert_tiles(
    sizes, capacity, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, PADDED: tl.constexpr
):
    """First row, number of rows, and end of the row tiles of each expert, in the order of all. `sizes`: see
    `Groups`."""
    experts = tl.arange(0, EXPERTS)
    known = experts < NUM_EXPERTS
    if PADDED:
        start = experts * capacity
        count = tl.load(sizes + experts, mask=known, other=0)
    else:
        start = tl.load(sizes + experts, mask=known, other=0)
        count = tl.load(sizes + experts + 1, mask=known, other=0) - start
    return start, count, tl.cumsum(tl.cdiv(count, BLOCK_M), 0)


@triton.jit
def find_tile(
    tile, total, start, count, ends,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, NUM_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Tile < total * NUM_N -> (expert, column tile, its first row, end of the expert's rows)."""
    tile_m, tile_n = grouped_order(tile, total, NUM_N, GROUP)
    expert = tl.sum((ends <= tile_m).to(tl.int32), 0)  # experts whose tiles all precede this one
    is_expert = tl.arange(0, EXPERTS) == expert
    before = ends - tl.cdiv(count, BLOCK_M)
    first = tl.sum(tl.where(is_expert, start + (tile_m - before) * BLOCK_M, 0), 0)
    return expert, tile_n, first, tl.sum(tl.where(is_expert, start + count, 0), 0)
