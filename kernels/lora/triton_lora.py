"""LoRA products on a GPU: two segmented kernels for all adapters of a step.

A program of the first (shrink) multiplies up to 16 tokens of one adapter by its A; a program of the second (expand)
multiplies the result by a block of its B's columns and adds it to y. Tokens without an adapter are in no tile.

Legend: T tokens, M of them with an adapter, S slots, P projections, R max rank, K in-features, N out-features, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.lora.protocol import TILE_TOKENS, AdapterTokens, LoraWeights
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.launch import element, stride_of, with_contiguous_rows

MAX_PARTS = 3
"""Max projections of one product: q, k and v."""
_RANKS = 256
"""Ranks of a program of the first kernel: two steps of 128 channels of them take 128 KiB of shared memory."""
_AT_ONCE = 128
"""Ranks of a product of the second kernel, whose operands are in registers."""


@triton.jit
def shrink_kernel(
    x, order, tiles, a, inner, x_stride, x_head_stride,
    RANKS: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, A_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """inner float32 [M, HEADS, RANKS] = x rows @ a.T. Grid (tiles, HEADS, RANKS / BLOCK_R); a [S, A_HEADS, RANKS, K] is
    contiguous."""
    tile, head = tiles + 3 * tl.program_id(0), tl.program_id(1)
    slot, begin, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    place = begin + tl.arange(0, BLOCK_M)
    live = (place < end)[:, None]
    row = tl.load(order + place, place < end, 0)
    ranks, lane = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    known = ranks < RANKS
    x_tile = x + row[:, None] * x_stride + head * x_head_stride + lane[None, :]
    matrix = (slot.to(tl.int64) * A_HEADS + head % A_HEADS) * (RANKS * K)
    a_tile = a + matrix + ranks[None, :] * K + lane[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + lane < K
        left = tl.load(x_tile + start, live & inside[None, :], 0.0)
        right = tl.load(a_tile + start, inside[:, None] & known[None, :], 0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    out = inner + (place[:, None].to(tl.int64) * HEADS + head) * RANKS + ranks[None, :]
    tl.store(out, total, live & known[None, :])


@triton.jit
def expand_kernel(
    y, order, tiles, b, inner, y_stride, y_head_stride,
    RANK: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr, B_HEADS: tl.constexpr,
    PARTS: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y rows += inner @ b, each column by its projection's part of inner. Grid (tiles, HEADS, N / BLOCK_N);
    b [S, B_HEADS, RANK, N] is contiguous. SECOND, THIRD: first columns of these projections."""
    tile, head = tiles + 3 * tl.program_id(0), tl.program_id(1)
    slot, begin, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    place = begin + tl.arange(0, BLOCK_M)
    live = (place < end)[:, None]
    row = tl.load(order + place, place < end, 0)
    ranks = tl.arange(0, BLOCK_R)
    column = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    part_of = (column >= SECOND).to(tl.int32) + (column >= THIRD).to(tl.int32)
    source = inner + (place[:, None].to(tl.int64) * HEADS + head) * (PARTS * RANK) + ranks[None, :]
    matrix = (slot.to(tl.int64) * B_HEADS + head % B_HEADS) * (RANK * N)
    b_tile = b + matrix + ranks[:, None] * N + column[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for part in tl.static_range(PARTS):
        own = (column < N) & (part_of == part)
        for first in range(0, RANK, BLOCK_R):
            known = first + ranks < RANK
            left = tl.load(source + part * RANK + first, live & known[None, :], 0.0).to(b.dtype.element_ty)
            right = tl.load(b_tile + first * N, known[:, None] & own[None, :], 0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
    target = y + row[:, None] * y_stride + head * y_head_stride + column[None, :]
    valid = live & (column < N)[None, :]
    before = tl.load(target, valid, 0.0).to(tl.float32)
    tl.store(target, (before + total).to(y.dtype.element_ty), valid)


class TritonLora:
    """`LoraKernel`."""

    name = "triton"

    def add(self, y: Tensor, x: Tensor, weights: LoraWeights, tokens: AdapterTokens) -> None:
        a, b = weights.a.unsqueeze(1), weights.b.unsqueeze(1)
        _run(y.unsqueeze(1), x.unsqueeze(1), a, b, weights.columns, tokens)

    def add_heads(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, tokens: AdapterTokens) -> None:
        _run(y, x, a, b, (0, b.shape[3]), tokens)


def _run(y: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: tuple[int, ...], tokens: AdapterTokens) -> None:
    """y [T, H, N], x [T, H, K], a [S, H or 1, P * R, K], b [S, H or 1, R, N].

    Raises:
        ValueError: if the widths differ, or there are more than three projections.
    """
    (_, heads, k), n, parts = x.shape, y.shape[2], len(columns) - 1
    rank = b.shape[2]
    if a.shape[2:] != (parts * rank, k) or b.shape[3] != n or columns[-1] != n or parts > MAX_PARTS:
        raise ValueError(f"rows {list(x.shape)} do not fit adapters {list(a.shape)} and {list(b.shape)}")
    if y.stride(2) != 1:
        raise ValueError(f"results {list(y.shape)} with strides {y.stride()}: the last dimension must be contiguous")
    x, num_tiles = with_contiguous_rows(x), len(tokens.tiles)
    inner = torch.empty(len(tokens.order), heads, parts * rank, dtype=torch.float32, device=x.device)
    first, second = _plans(heads, a.shape[1], b.shape[1], k, n, rank, columns, x.dtype)
    shrink_kernel[(num_tiles, heads, triton.cdiv(parts * rank, first["BLOCK_R"]))](
        x, tokens.order, tokens.tiles, a, inner, stride_of(x, 0), stride_of(x, 1), **first, num_warps=4
    )
    expand_kernel[(num_tiles, heads, triton.cdiv(n, second["BLOCK_N"]))](
        y, tokens.order, tokens.tiles, b, inner, stride_of(y, 0), stride_of(y, 1), **second, num_warps=4
    )


def _plans(
    heads: int, a_heads: int, b_heads: int, k: int, n: int, rank: int, columns: tuple[int, ...], dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants of the two kernels."""
    parts, wide = len(columns) - 1, dtype == torch.float32
    starts = [*columns[1:-1], n, n][:2]
    first = {
        "RANKS": parts * rank, "K": k, "HEADS": heads, "A_HEADS": a_heads, "BLOCK_M": TILE_TOKENS,
        "BLOCK_R": min(_RANKS, max(16, next_power_of_2(parts * rank))),
        "BLOCK_K": min(32 if wide else 128, max(16, next_power_of_2(k))),
    }  # fmt: skip
    second = {
        "RANK": rank, "N": n, "HEADS": heads, "B_HEADS": b_heads, "PARTS": parts, "SECOND": starts[0],
        "THIRD": starts[1], "BLOCK_M": TILE_TOKENS, "BLOCK_R": min(_AT_ONCE, max(16, next_power_of_2(rank))),
        "BLOCK_N": min(32 if wide else 128, max(16, next_power_of_2(n))),
    }  # fmt: skip
    return first, second


def lora_cases(
    label: str, heads: int, a_heads: int, b_heads: int, k: int, rank: int, columns: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
) -> list[AotCase]:  # fmt: skip
    """The specializations that a product launches."""
    first, second = _plans(heads, a_heads, b_heads, k, columns[-1], rank, columns, dtype)
    kind = f"*{element(dtype)}"
    common = {"order": "*i64", "tiles": "*i32", "inner": "*fp32"}
    name = f"{label}_r{rank}_{element(dtype)}"
    matrix = dtype != torch.float32
    shrink = {**common, "x": kind, "a": kind, "x_stride": "i32:16", "x_head_stride": "i32:16"}
    expand = {**common, "y": kind, "b": kind, "y_stride": "i32:16", "y_head_stride": "i32:16"}
    return [
        AotCase(f"lora_shrink_{name}", shrink_kernel, shrink, first, 4, 3, matrix),
        AotCase(f"lora_expand_{name}", expand_kernel, expand, second, 4, 3, matrix),
    ]


def aot_cases() -> list[AotCase]:
    """q, k and v of a Llama with 8 B parameters, and DeepSeek-V3's o_proj and absorbed keys of 16 heads."""
    return [
        *(case for rank in (16, 256) for case in lora_cases("qkv", 1, 1, 1, 4096, rank, (0, 4096, 5120, 6144))),
        *lora_cases("o", 1, 1, 1, 16384, 64, (0, 7168)),
        *lora_cases("keys", 16, 16, 1, 128, 16, (0, 512)),
        *lora_cases("o", 1, 1, 1, 2048, 16, (0, 7168), torch.float32),
    ]
