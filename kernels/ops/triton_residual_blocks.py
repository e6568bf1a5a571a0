"""Attention over blocks of the residual in Triton (`residual_blocks`), with the norm of the sum: one launch, a program
for each token, so that a token's values do not depend on others.

Legend: T tokens, D hidden, N rows of a token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.ops.residual_blocks import BlockWeights, mix_blocks
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import element, row_stride, with_contiguous_rows

MAX_ROWS = 16
"""Residuals with more rows are mixed in torch."""
BLOCK, WARPS = 512, 8
"""Channels of an iteration."""


@triton.jit
def _rows(x, line, first, WRITTEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
          ADD: tl.constexpr, STARTS: tl.constexpr):  # fmt: skip
    """Rows [ROWS, BLOCK] of a token with the result in the last one, that one [BLOCK], channels, and those inside."""
    column = first + tl.arange(0, BLOCK)
    inside, row = column < WIDTH, tl.arange(0, ROWS)
    last = line + WRITTEN * WIDTH + column
    new = tl.zeros([BLOCK], tl.float32)
    if not STARTS:
        new = tl.load(last, inside, 0.0).to(tl.float32)
    if ADD:
        new += tl.load(x + column, inside, 0.0).to(tl.float32)
    new = new.to(line.dtype.element_ty).to(tl.float32)
    place = line + row[:, None] * WIDTH + column[None, :]
    values = tl.load(place, (row < WRITTEN)[:, None] & inside[None, :], 0.0).to(tl.float32)
    return tl.where((row == WRITTEN)[:, None], new[None, :], values), new, column, inside


@dependent_jit
def mix_blocks_kernel(
    x, residual, norm, proj, out_norm, out, x_stride, residual_stride, eps,
    WRITTEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    STARTS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """out [T, D] = the weighted sum of rows [0, WRITTEN], or its norm; with ADD, x is added to the last of these, or
    with STARTS stored there. Grid (T,)."""
    wait_for_inputs()
    token, row = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS)
    x += token * x_stride
    line, out = residual + token * residual_stride, out + token * WIDTH
    squares, products = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for first in range(0, WIDTH, BLOCK):
        values, _, column, inside = _rows(x, line, first, WRITTEN, WIDTH, ROWS, BLOCK, ADD, STARTS)
        score = tl.load(norm + column, inside, 0.0) * tl.load(proj + column, inside, 0.0)
        squares += tl.sum(values * values, 1)
        products += tl.sum(values * score[None, :], 1)
    scores = tl.where(row <= WRITTEN, products * tl.rsqrt(squares / WIDTH + eps), float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 0))
    weights /= tl.sum(weights, 0)
    kind: tl.constexpr = out.dtype.element_ty
    factor = 1.0
    if NORM:
        square = tl.zeros([BLOCK], tl.float32)
        for first in range(0, WIDTH, BLOCK):
            values, _, _, _ = _rows(x, line, first, WRITTEN, WIDTH, ROWS, BLOCK, ADD, STARTS)
            total = tl.sum(values * weights[:, None], 0).to(kind).to(tl.float32)
            square += total * total
        factor = tl.rsqrt(tl.sum(square, 0) / WIDTH + eps)
    for first in range(0, WIDTH, BLOCK):
        values, new, column, inside = _rows(x, line, first, WRITTEN, WIDTH, ROWS, BLOCK, ADD, STARTS)
        total = tl.sum(values * weights[:, None], 0).to(kind)
        if NORM:
            normed = (total.to(tl.float32) * factor).to(kind).to(tl.float32)
            total = (normed * tl.load(out_norm + column, inside, 0.0)).to(kind)
        tl.store(out + column, total, inside)
        if ADD:
            tl.store(line + WRITTEN * WIDTH + column, new.to(kind), inside)


def mix(x: Tensor | None, residual: Tensor, weights: BlockWeights, norm: Tensor | None) -> Tensor:
    """`MixBlocks`."""
    if weights.written >= MAX_ROWS or residual.stride(1) != 1:
        return mix_blocks(x, residual, weights, norm)
    tokens, width = len(residual), len(weights.norm)
    out = residual.new_empty(tokens, width)
    if tokens:
        added = residual if x is None else with_contiguous_rows(x)
        mix_blocks_kernel[(tokens,)](
            added, residual, weights.norm, weights.proj, norm, out, row_stride(added), row_stride(residual),
            weights.eps, **_constants(weights, x is not None), NORM=norm is not None, num_warps=WARPS,
        )  # fmt: skip
    return out


def _constants(weights: BlockWeights, adds: bool) -> dict[str, Any]:
    return {
        "WRITTEN": weights.written, "WIDTH": len(weights.norm), "ROWS": next_power_of_2(weights.written + 1),
        "BLOCK": BLOCK, "ADD": adds, "STARTS": adds and weights.starts,
    }  # fmt: skip


def aot_cases() -> list[AotCase]:
    """Kimi K3: the first norm, the start of a block, and the last block."""
    cases = []
    vector = torch.empty(7168, device="meta")
    for dtype, written, starts, adds in (
        (torch.bfloat16, 0, False, False), (torch.bfloat16, 1, True, True), (torch.bfloat16, 8, False, True),
        (torch.float32, 8, False, True),
    ):  # fmt: skip
        kind = f"*{element(dtype)}"
        constants = _constants(BlockWeights(vector, vector, 1e-5, written, starts), adds) | {"NORM": True}
        signature = dict.fromkeys(("x", "residual", "out"), kind) | dict.fromkeys(("norm", "proj", "out_norm"), "*fp32")
        signature |= {"x_stride": "i32:16", "residual_stride": "i32:16", "eps": "fp32"}
        name = f"mix_blocks_k3_{written}{'_starts' * starts}_{element(dtype)}"
        cases.append(AotCase(name, mix_blocks_kernel, signature, constants, WARPS, 3, False))
    return cases
