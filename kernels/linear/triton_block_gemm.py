"""Products of FP8 rows with an FP8 weight in blocks, or with a scale per row, in Triton.

Legend: M rows, N out-features, K in-features. out[m, n] = sum over blocks b of K of
(sum over k in b of x[m, k] * w[n, k]) * x_scale[m, b] * w_scale[n div 128, b]. A scale of row n is multiplied with the
whole sum.

Each block of 128 in K is summed by the tensor cores and then added to float32 registers with its scales.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_engine.kernels.linear.products import (
    add_product,
    empty_tile,
    grouped_order,
    load_scale,
    load_step,
    scale_columns,
    weight_tile,
)
from moe_engine.kernels.linear.shapes import DEEPSEEK_V3, LinearShape
from moe_engine.kernels.linear.tiles import (
    FEW_BLOCK_FP8,
    FEW_ROWS,
    WIDE_BLOCK_FP8,
    Tiles,
    block_fp8_tiles,
    normed_tiles,
)
from moe_engine.kernels.quantization.protocol import (
    BLOCK,
    BLOCK_FP8,
    ROW_FP8,
    BlockFP8,
    BlockWeight,
    QuantizedRows,
    RowFP8,
    RowsToNorm,
    RowWeight,
)
from moe_engine.kernels.quantization.triton_rows import quantize_tile
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import element, stride_of, with_contiguous_rows
from moe_engine.kernels.triton.prefetch import UNIT, can_request, prefetch_own

_SUM_TILE = 1024  # elements per program when summing a split product
_LEAST = tl.constexpr(1e-30)
"""Min amax of a block of rows that are not normed yet, which may be small."""


@dependent_jit(do_not_specialize=["num_rows", "scale_stride"])
def block_gemm_kernel(
    x, x_scales, norm, weight, weight_scales, bias, out, num_rows, x_stride, scale_stride, eps,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, SWAP_AB: tl.constexpr, TMA: tl.constexpr, HAS_BIAS: tl.constexpr,
    AHEAD: tl.constexpr, ROWS: tl.constexpr, QUANTIZE: tl.constexpr, POWER_OF_TWO: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """out [M, N] of x [M, K] and weight [N, K]; with SPLIT > 1 float32 [SPLIT, M, N], one part of K each.

    With TMA `x` and `weight` are descriptors of [BLOCK_M, BLOCK_K] and [BLOCK_N, BLOCK_K] tiles. AHEAD: as in
    `fixed_gemm_kernel`. ROWS: weight_scales is [N]. QUANTIZE: x is not quantized, its rows start every x_stride, and
    each program quantizes it; NORM: its RMSNorm, with the weight `norm` [K]. The inverse root mean square of a
    row multiplies its sums: rows are read once, and quantized without it.
    """
    prefetch_own(weight, tl.program_id(0) * AHEAD, AHEAD, N * K)
    wait_for_inputs()
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SHARE: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    part = tl.program_id(1)
    tile_m, tile_n = grouped_order(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), NUM_N, GROUP)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    live = rows < num_rows  # as in `fixed_gemm_kernel`
    w_rows = tl.minimum(cols, N - 1)
    if QUANTIZE:
        x_tile = x + rows.to(tl.int64)[:, None] * x_stride + lane[None, :]
    else:
        x_tile = weight_tile(x, rows, lane, K, TMA)
    if NORM:
        squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    w_tile = weight_tile(weight, w_rows, lane, K, TMA)
    w_scale = weight_scales + (tile_n * BLOCK_N // BLOCK_K) * STEPS
    total = empty_tile(BLOCK_M, BLOCK_N, SWAP_AB)
    for step in range(part * SHARE, tl.minimum((part + 1) * SHARE, STEPS)):
        a = load_step(x_tile, tile_m * BLOCK_M, step, lane, K, BLOCK_K, TMA, live)
        b = load_step(w_tile, tile_n * BLOCK_N, step, lane, K, BLOCK_K, TMA)
        if NORM:
            channels = step * BLOCK_K + lane
            wide = a.to(tl.float32)
            squares += wide * wide
            wide *= tl.load(norm + channels, mask=channels < K, other=0.0).to(tl.float32)[None, :]
            a, x_scale = quantize_tile(wide, POWER_OF_TWO, _LEAST)
        elif QUANTIZE:
            a, x_scale = quantize_tile(a.to(tl.float32), POWER_OF_TWO)
        else:
            x_scale = tl.load(x_scales + step * scale_stride + rows, mask=live, other=0.0)
        total = add_product(total, a, b, x_scale, load_scale(w_scale, step, ROWS == 0), SWAP_AB, True)
    if ROWS:
        total = scale_columns(total, weight_scales + w_rows, SWAP_AB)
    if SWAP_AB:
        total = tl.trans(total)
    if NORM:
        total *= tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + w_rows).to(tl.float32)[None, :]
    place = out + (part * num_rows + rows).to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=live[:, None] & (cols < N)[None, :])


@dependent_jit(do_not_specialize=["num_rows"])
def sum_parts_kernel(
    parts, bias, out, num_rows,
    N: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """parts float32 [SPLIT, M, N] -> out [M, N], summed in the order of the parts."""
    wait_for_inputs()
    size = num_rows.to(tl.int64) * N
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < size
    total = tl.zeros((TILE,), tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts + part * size + place, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + place % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


def block_gemm(
    rows: QuantizedRows | Tensor | RowsToNorm,
    weight: BlockWeight | RowWeight,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """rows [M, K] x weight [N, K] (+ bias [N]) -> [M, N] in `dtype`. No host synchronization.

    Args:
        rows: a Tensor, whose rows may be strided, is quantized in the same launch, by each of its programs: for few
            rows of at most `MOST_QUANTIZED` columns. Of `RowsToNorm` each program computes the norm too, without
            rounding it before it is quantized.
        tiles: tiling; default: from the table, or of `RowsToNorm` by N.

    Raises:
        ValueError: if the widths differ.
    """
    norm, eps = (rows.weight, rows.eps) if isinstance(rows, RowsToNorm) else (None, 0.0)
    x, scales, stride = _operand(rows.rows if isinstance(rows, RowsToNorm) else rows)
    m, (n, k) = x.shape[0], weight.data.shape
    if x.shape[1] != k:
        raise ValueError(f"rows {list(x.shape)} do not fit a weight [{n}, {k}]")
    out = torch.empty(m, n, dtype=dtype, device=x.device)
    if not m or not n:
        return out
    tiles = tiles or (block_fp8_tiles(m, n, k) if norm is None else normed_tiles(n))
    split = tiles.split > 1
    target = torch.empty(tiles.split, m, n, dtype=torch.float32, device=out.device) if split else out
    matrix, x_stride = weight.data, stride_of(x, 0) if scales is None else 0
    tma = tiles.tma and fits_tma(matrix) and fits_tma(x)
    if tma:
        x = TensorDescriptor.from_tensor(x, [tiles.block_m, BLOCK])
        matrix = TensorDescriptor.from_tensor(matrix, [tiles.block_n, BLOCK])
    grid = (triton.cdiv(m, tiles.block_m) * triton.cdiv(n, tiles.block_n), tiles.split)
    block_gemm_kernel[grid](
        x, scales, norm, matrix, weight.scales, None if split else bias, target, m, x_stride, stride, eps,
        **_constants(weight, tiles, tma, bias is not None and not split, scales is None, norm is not None),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if split:
        sum_parts(target, bias, out)
    return out


def _operand(rows: QuantizedRows | Tensor) -> tuple[Tensor, Tensor | None, int]:
    """Values [M, K], their scales, and the scales' stride; quantized ones are contiguous."""
    if isinstance(rows, Tensor):
        return with_contiguous_rows(rows), None, 0
    return rows.data, rows.scales, rows.scale_stride


def sum_parts(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [M, N] = the sum of float32 [SPLIT, M, N] (+ bias [N])."""
    m, n = out.shape
    sum_parts_kernel[(triton.cdiv(m * n, _SUM_TILE),)](
        parts, bias, out, m, N=n, SPLIT=len(parts), TILE=_SUM_TILE, HAS_BIAS=bias is not None, num_warps=4
    )


def fits_tma(matrix: Tensor) -> bool:
    """True if TMA can read tiles of a contiguous [N, K]: address and row size in multiples of 16 bytes."""
    return matrix.data_ptr() % 16 == 0 and matrix.shape[1] * matrix.element_size() % 16 == 0


def _constants(
    weight: BlockWeight | RowWeight, tiles: Tiles, tma: bool, has_bias: bool, quantizes: bool = False,
    norms: bool = False,
) -> dict[str, Any]:  # fmt: skip
    n, k = weight.data.shape
    requests = tiles in (FEW_BLOCK_FP8, WIDE_BLOCK_FP8) and k % UNIT == 0 and can_request(weight.data)
    return {
        "N": n, "K": k, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": BLOCK, "GROUP": tiles.group,
        "SPLIT": tiles.split, "SWAP_AB": tiles.swap_ab, "TMA": tma, "HAS_BIAS": has_bias,
        "AHEAD": tiles.block_n * k if requests else 0, "ROWS": isinstance(weight, RowWeight),
        "QUANTIZE": quantizes, "POWER_OF_TWO": quantizes and weight.power_of_two, "NORM": norms,
    }  # fmt: skip


def cases_of(
    shape: LinearShape, dtype: torch.dtype = torch.bfloat16, tiles: Tiles | None = None,
    format: BlockFP8 | RowFP8 = BLOCK_FP8, quantizes: bool = False, norms: bool = False,
) -> list[AotCase]:  # fmt: skip
    """The kernels launched by one product, without a bias. quantizes: of rows in `dtype`; norms: of their norm."""
    tiles, n, k = tiles or block_fp8_tiles(shape.rows, shape.n, shape.k), shape.n, shape.k
    result = element(torch.float32 if tiles.split > 1 else dtype)
    signature = {
        "x": "*fp8e4nv", "x_scales": "*fp32", "weight": "*fp8e4nv", "weight_scales": "*fp32", "out": f"*{result}",
        "num_rows": "i32", "x_stride": "i32:16", "scale_stride": "i32", "eps": "fp32",
    }  # fmt: skip
    if tiles.tma:
        signature["x"] = f"tensordesc<fp8e4nv[{tiles.block_m}, {BLOCK}]>"
        signature["weight"] = f"tensordesc<fp8e4nv[{tiles.block_n}, {BLOCK}]>"
    constants = _constants(format.empty(n, k, "meta"), tiles, tiles.tma, False, quantizes, norms) | {"bias": None}
    if norms:
        signature["norm"] = "*fp32"
    else:
        constants["norm"] = None
    if quantizes:
        signature["x"] = f"*{element(dtype)}"
        del signature["x_scales"]
        constants["x_scales"] = None
    name = f"block_gemm_{n}x{k}_tile{tiles.block_m}x{tiles.block_n}" + "_rows" * constants["ROWS"]
    name += "_quantizes" * (quantizes and not norms) + "_norms" * norms
    cases = [AotCase(name, block_gemm_kernel, signature, constants, tiles.num_warps, tiles.num_stages, True)]
    return [*cases, sum_parts_case(n, tiles.split, dtype)] if tiles.split > 1 else cases


def sum_parts_case(n: int, split: int, dtype: torch.dtype) -> AotCase:
    """The case of `sum_parts` without a bias."""
    signature = {"parts": "*fp32", "out": f"*{element(dtype)}", "num_rows": "i32"}
    constants = {"N": n, "SPLIT": split, "TILE": _SUM_TILE, "HAS_BIAS": False, "bias": None}
    return AotCase(f"sum_parts_{n}x{split}_{element(dtype)}", sum_parts_kernel, signature, constants, 4, 3, False)


def aot_cases() -> list[AotCase]:
    """DeepSeek V3's products in each row of the tile table."""
    found: dict[str, AotCase] = {}
    for rows in (16, 32, 64, 256, 4096):
        for shape in DEEPSEEK_V3.at(rows):
            found |= {case.name: case for case in cases_of(shape)}
    for shape in DEEPSEEK_V3.at(FEW_ROWS):
        found |= {case.name: case for case in cases_of(shape, tiles=FEW_BLOCK_FP8)}
    for format in (BLOCK_FP8, BlockFP8(power_of_two=True)):  # o_b of DeepSeek V4-Flash on 8 ranks
        output = LinearShape("o_b", FEW_ROWS, 4096, 1024, True)
        for case in cases_of(output, tiles=FEW_BLOCK_FP8, format=format, quantizes=True):
            name = case.name + "_exponents" * format.power_of_two
            found[name] = replace(case, name=name)
    # q_b of DeepSeek V3 on 8 ranks and on one, and of V4-Flash on 8 ranks; of V4.1's width with a scale per row
    latents: tuple[tuple[int, int, BlockFP8 | RowFP8], ...] = (
        (3072, 1536, BLOCK_FP8), (24576, 1536, BLOCK_FP8), (4096, 1024, BlockFP8(power_of_two=True)),
        (4096, 1280, ROW_FP8),
    )  # fmt: skip
    for n, k, form in latents:
        query = LinearShape("q_b", FEW_ROWS, n, k, True)
        for case in cases_of(query, tiles=normed_tiles(n), format=form, quantizes=True, norms=True):
            found[case.name] = case
    for rows in (FEW_ROWS, 64, 4096):
        found |= {case.name: case for case in cases_of(next(DEEPSEEK_V3.at(rows)), format=ROW_FP8)}
    for case in cases_of(next(DEEPSEEK_V3.at(FEW_ROWS)), tiles=FEW_BLOCK_FP8, format=ROW_FP8):
        found[case.name] = case
    return list(found.values())
