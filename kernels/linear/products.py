"""Triton helpers of dense and grouped matrix products: tile order, loads, one accumulation step.

Legend: M rows, N out-features, K in-features; a tile is BLOCK_M x BLOCK_N results, a step BLOCK_K of K.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_order(tile, num_m, NUM_N: tl.constexpr, GROUP: tl.constexpr):
    """Program index -> (row tile, column tile): GROUP row tiles share a column tile before the next (L2 swizzle)."""
    group = tile // (GROUP * NUM_N)
    first = group * GROUP
    height = tl.maximum(tl.minimum(num_m - first, GROUP), 1)
    inside = tile - group * (GROUP * NUM_N)
    return first + inside % height, inside // height


@triton.jit
def weight_tile(weight, rows, lane, K: tl.constexpr, TMA: tl.constexpr):
    """Argument of `load_step` for rows of a weight [., K]: pointers to their first step, or the TMA descriptor. Rows
    beyond the edge repeat the last row: loads need no mask, and their results are not stored."""
    if TMA:
        tile = weight
    else:
        tile = weight + rows.to(tl.int64)[:, None] * K + lane[None, :]
    return tile


@triton.jit
def load_step(tile, row, step, lane, K: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, live=None):
    """Channels [step * BLOCK_K, + BLOCK_K) of a tile's rows, zeros beyond K. The tile is pointers to its first step, or
    with TMA the descriptor of a matrix in which it starts at `row`. live: without TMA, the rows that are read; others
    are zeros."""
    if TMA:
        values = tile.load([row, step * BLOCK_K])
    elif K % BLOCK_K == 0 and live is None:
        values = tl.load(tile + step * BLOCK_K)
    elif K % BLOCK_K == 0:
        values = tl.load(tile + step * BLOCK_K, mask=live[:, None], other=0.0)
    elif live is not None:
        values = tl.load(tile + step * BLOCK_K, mask=live[:, None] & (step * BLOCK_K + lane < K)[None, :], other=0.0)
    else:
        values = tl.load(tile + step * BLOCK_K, mask=(step * BLOCK_K + lane < K)[None, :], other=0.0)
    return values


@triton.jit
def load_scale(scales, place, FP8: tl.constexpr):
    """The scales of one step; 1 without FP8."""
    if FP8:
        scale = tl.load(scales + place)
    else:
        scale = 1.0
    return scale


@triton.jit
def scale_columns(total, scales, SWAP_AB: tl.constexpr):
    """total [M, N], or with SWAP_AB [N, M], times a scale of each of the N columns; `scales`: pointers to them."""
    axis: tl.constexpr = 1 if SWAP_AB else 0
    return total * tl.expand_dims(tl.load(scales), axis)


@triton.jit
def empty_tile(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP_AB: tl.constexpr):
    """Zero accumulator of `add_product`."""
    if SWAP_AB:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    return total


@triton.jit
def add_product(total, x, w, x_scale, w_scale, SWAP_AB: tl.constexpr, FP8: tl.constexpr):
    """total + x [M, k] @ w [N, k].T in float32, as [M, N], or with SWAP_AB as its transpose [N, M].

    FP8: the tensor cores sum one step only; it is then added with its scales, x_scale [M] and w_scale: Hopper's FP8
    accumulators keep about 14 bits, so longer sums in them lose precision (DeepSeek-V3 report, section 3.3.2).
    """
    if FP8:
        scale = x_scale * w_scale
        if SWAP_AB:
            total += tl.dot(w, tl.trans(x)) * scale[None, :]
        else:
            total += tl.dot(x, tl.trans(w)) * scale[:, None]
    elif SWAP_AB:
        total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    else:
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    return total
