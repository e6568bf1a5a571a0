"""Products of unquantized rows with a weight in 4 bits, in Triton; `triton_four_bits` has the weight's memory.

    out[m, n] = sum over k of x[m, k] * w[n, k] (+ bias[n])

Codes are decoded in registers for each tile of rows: few rows read a quarter of the bytes of a bf16 weight, many rows
decode it once for 128 of them.

Legend: M rows, N out-features, K in-features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_engine.kernels.linear import triton_four_bits
from moe_engine.kernels.linear.products import empty_tile, grouped_order, load_step, weight_tile
from moe_engine.kernels.linear.shapes import AWQ, FOUR_BIT_PRODUCTS, LinearShape
from moe_engine.kernels.linear.tiles import FIXED_FOUR_BITS, FOUR_BITS, FOUR_BITS_WIDE, Tiles, split_tiles
from moe_engine.kernels.linear.triton_block_gemm import sum_parts, sum_parts_case
from moe_engine.kernels.linear.triton_four_bits import (
    HALF,
    add_four_bits,
    first_columns,
    options_of,
    scale_tile,
    scales_dtype,
    whole_factor,
)
from moe_engine.kernels.quantization.codes import STEP, CodedWeight, GroupCodes
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import element, stride_of, with_contiguous_rows

_HALF = tl.constexpr(HALF)


@dataclass(frozen=True)
class FourBitsWeight:
    """A weight [N, K]: codes uint8 [N, K / 2], scales of `triton_four_bits`, of NVFP4 factors float32 [N] too."""

    codes: Tensor
    scales: Tensor
    whole: Tensor | None
    format: GroupCodes

    @classmethod
    def of(cls, weight: CodedWeight) -> FourBitsWeight:
        """A copy in the kernel's layout."""
        (n, k), device = weight.shape, weight.codes.device
        (codes,), (scales,) = triton_four_bits.empty(weight.format, 1, n, k, device)
        triton_four_bits.store(weight, codes, scales)
        whole = None if weight.whole is None else weight.whole.contiguous()
        return cls(codes, scales, whole, weight.format)

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scales, self.whole) if part is not None)


@dependent_jit(do_not_specialize=["num_rows"])
def four_bits_gemm_kernel(
    x, weight, scales, whole, bias, out, num_rows, x_stride,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, SWAP_AB: tl.constexpr, HAS_BIAS: tl.constexpr, FORM: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """out [M, N] of x [M, K] and weight [N, K / 2]; with SPLIT > 1 float32 [SPLIT, M, N], one part of K each."""
    wait_for_inputs()
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SHARE: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    part = tl.program_id(1)
    tile_m, tile_n = grouped_order(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), NUM_N, GROUP)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = first_columns(FORM, BLOCK_K)
    w_lane = tl.arange(0, BLOCK_K // 2)
    x_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    w_rows = tl.minimum(cols, N - 1)
    x_tile = x + x_rows[:, None] * x_stride + lane[None, :]
    w_tile = weight_tile(weight, w_rows, w_lane, K // 2, False)
    w_scale = scale_tile(scales, w_rows, SCALES, FORM)
    total = empty_tile(BLOCK_M, BLOCK_N, SWAP_AB)
    for step in range(part * SHARE, tl.minimum((part + 1) * SHARE, STEPS)):
        a = load_step(x_tile, 0, step, lane, K, BLOCK_K, False)
        high = a
        if FORM != "mxfp4":
            high = load_step(x_tile + _HALF, 0, step, lane + _HALF, K, BLOCK_K, False)
        b = load_step(w_tile, 0, step, w_lane, K // 2, BLOCK_K // 2, False)
        total = add_four_bits(total, a, high, b, w_scale, step, N, SCALES, FORM, SWAP_AB)
    if SWAP_AB:
        total = tl.trans(total)
    if FORM == "nvfp4":
        total *= whole_factor(whole + w_rows, x)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + w_rows).to(tl.float32)[None, :]
    place = out + (part * num_rows + rows).to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(rows < num_rows)[:, None] & (cols < N)[None, :])


def four_bits_gemm(
    x: Tensor, weight: FourBitsWeight, bias: Tensor | None = None, deterministic: bool = False
) -> Tensor:
    """x [M, K] x weight [N, K] (+ bias [N]) -> [M, N] in x's dtype. No host synchronization.

    Args:
        deterministic: the tiling does not depend on the number of rows (batch-invariant results).

    Raises:
        ValueError: if the widths differ.
    """
    m, (n, half) = x.shape[0], weight.codes.shape
    if x.shape[1] != 2 * half:
        raise ValueError(f"rows {list(x.shape)} do not fit a weight [{n}, {2 * half}]")
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if not m:
        return out
    x, tiles = with_contiguous_rows(x), tiles_for(m, n, 2 * half, x.dtype, deterministic)
    split = tiles.split > 1
    target = torch.empty(tiles.split, m, n, dtype=torch.float32, device=x.device) if split else out
    grid = (triton.cdiv(m, tiles.block_m) * triton.cdiv(n, tiles.block_n), tiles.split)
    four_bits_gemm_kernel[grid](
        x, weight.codes, weight.scales, weight.whole, None if split else bias, target, m, stride_of(x, 0),
        **_constants(n, 2 * half, tiles, weight.format, bias is not None and not split),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **options_of(weight.format),
    )  # fmt: skip
    if split:
        sum_parts(target, bias, out)
    return out


def tiles_for(num_rows: int, n: int, k: int, dtype: torch.dtype, deterministic: bool = False) -> Tiles:
    """Tiles for rows in `dtype`."""
    if dtype == torch.float32:
        return FOUR_BITS_WIDE.at(num_rows)
    return FIXED_FOUR_BITS if deterministic else split_tiles(FOUR_BITS, num_rows, n, k)


def _constants(n: int, k: int, tiles: Tiles, format: GroupCodes, has_bias: bool) -> dict[str, Any]:
    return {
        "N": n, "K": k, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": STEP, "GROUP": tiles.group,
        "SPLIT": tiles.split, "SWAP_AB": tiles.swap_ab, "HAS_BIAS": has_bias,
        **triton_four_bits.constants_of(format),
    }  # fmt: skip


def cases_of(shape: LinearShape, deterministic: bool = False) -> list[AotCase]:
    """The kernels launched by one product of more than one row, without a bias."""
    format, n, k = shape.format, shape.n, shape.k
    assert format is not None
    dtype = torch.float16 if format == AWQ else torch.bfloat16
    tiles = tiles_for(shape.rows, n, k, dtype, deterministic)
    result = torch.float32 if tiles.split > 1 else dtype
    signature = {
        "x": f"*{element(dtype)}", "weight": "*u8", "scales": f"*{element(scales_dtype(format))}",
        "out": f"*{element(result)}", "num_rows": "i32", "x_stride": "i32:16",
    }  # fmt: skip
    none: dict[str, Any] = {"bias": None, "whole": None}
    if format.nvfp4:
        signature["whole"] = f"*{element(torch.float32)}"
        del none["whole"]
    model = shape.name.partition(".")[0]
    name = f"four_bits_gemm_{model}_{n}x{k}_tile{tiles.block_m}x{tiles.block_n}{'_fixed' * deterministic}"
    constants = _constants(n, k, tiles, format, False) | none
    found = [
        AotCase(
            name, four_bits_gemm_kernel, signature, constants, tiles.num_warps, tiles.num_stages, True,
            options_of(format),
        )
    ]  # fmt: skip
    return [*found, sum_parts_case(n, tiles.split, dtype)] if tiles.split > 1 else found


def aot_cases() -> list[AotCase]:
    """A product of an 8B Llama in each form and row of the tile table; of AWQ's another one, and fixed tiles."""
    found: dict[str, AotCase] = {}
    for model in FOUR_BIT_PRODUCTS:
        for rows in (16, 32, 64, 4096):
            first, *_, last = model.at(rows)
            for shape in (first, last) if model.format == AWQ else (first,):
                found |= {case.name: case for case in cases_of(shape)}
    fixed = cases_of(next(FOUR_BIT_PRODUCTS[0].at(1)), deterministic=True)
    return [case for case in (*found.values(), *fixed) if case.kernel is four_bits_gemm_kernel]
