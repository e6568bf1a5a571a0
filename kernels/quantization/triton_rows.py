"""FP8 quantization of activations in Triton, alone and fused with its producer: RMSNorm (+ residual), SiLU-mul.

Legend: M rows, K channels, I width of an MLP. One scale per row and 128 channels; tiles are [rows, 128].
Widths and strides are compile-time constants, the number of rows is not: a larger batch compiles nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_engine.kernels.gate_form import clamp_of
from moe_engine.kernels.quantization.protocol import BLOCK, FP8_MAX, MIN_AMAX, QuantizedRows
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.clamped_gate import silu_mul
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import with_contiguous_rows
from moe_engine.kernels.triton.prefetch import IN_GAP, prefetch_shared, requested

_BLOCK = tl.constexpr(BLOCK)
_FP8_MAX = tl.constexpr(FP8_MAX)
_MIN_AMAX = tl.constexpr(MIN_AMAX)

TILE_ROWS = 16  # of [rows, 128] tiles: 4 KiB of bf16 per program
_UNSPECIALIZED = ["num_rows", "scale_stride"]


@triton.jit
def power_of_two_above(scale):
    """The smallest power of two >= a positive float32: a non-zero mantissa carries into the exponent."""
    bits = scale.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def quantize_tile(x, POWER_OF_TWO: tl.constexpr, LEAST: tl.constexpr = _MIN_AMAX):
    """x float32 [M, 128] -> (e4m3 [M, 128], scale [M]): amax, at least LEAST, / 448, or the power of two above it. NaN
    stays NaN."""
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=1), LEAST), _FP8_MAX)
    if POWER_OF_TWO:
        scale = power_of_two_above(scale)
    return (x * tl.div_rn(1.0, scale)[:, None]).to(tl.float8e4nv), scale  # the cast saturates


@triton.jit
def store_scale(scales, block, row, stride, scale, mask):
    """The scale of a block of a row, in the form of `scales`: float32, or four exponents in each int32."""
    if scales.dtype.element_ty == tl.int32:
        place = scales.to(tl.pointer_type(tl.uint8), bitcast=True) + ((block // 4) * stride + row) * 4 + block % 4
        tl.store(place, (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=mask)
    else:
        tl.store(scales + block * stride + row, scale, mask=mask)


@dependent_jit(do_not_specialize=_UNSPECIALIZED)
def quantize_kernel(
    x, out, scales, num_rows, scale_stride,
    WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, ROWS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """x [M, WIDTH] -> out e4m3 [M, WIDTH], scales; grid (M / ROWS, WIDTH / 128)."""
    wait_for_inputs()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    cols = block * _BLOCK + tl.arange(0, _BLOCK)
    inside = rows < num_rows
    mask = inside[:, None] & (cols < WIDTH)[None, :]
    line = rows.to(tl.int64)[:, None]
    tile = tl.load(x + line * X_STRIDE + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    quantized, scale = quantize_tile(tile, POWER_OF_TWO)
    tl.store(out + line * WIDTH + cols[None, :], quantized, mask=mask)
    store_scale(scales, block, rows, scale_stride, scale, inside)


@dependent_jit(do_not_specialize=_UNSPECIALIZED)
def silu_mul_quantize_kernel(
    gate_up, out, scales, num_rows, scale_stride, limit,
    WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, ROWS: tl.constexpr, POWER_OF_TWO: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """gate_up [M, 2 * WIDTH] -> silu(gate) * up as e4m3 [M, WIDTH], scales; grid (M / ROWS, WIDTH / 128). CLAMP:
    `limit` as in `Ops.silu_and_mul`."""
    wait_for_inputs()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    cols = block * _BLOCK + tl.arange(0, _BLOCK)
    inside = rows < num_rows
    mask = inside[:, None] & (cols < WIDTH)[None, :]
    line = rows.to(tl.int64)[:, None]
    source = gate_up + line * X_STRIDE + cols[None, :]
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=mask, other=0.0).to(tl.float32)
    quantized, scale = quantize_tile(silu_mul(gate, up, limit, CLAMP), POWER_OF_TWO)
    tl.store(out + line * WIDTH + cols[None, :], quantized, mask=mask)
    store_scale(scales, block, rows, scale_stride, scale, inside)


@triton.jit
def store_norm(
    value, weight, normed, out, scales, scale_stride, eps, row,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, KEEP: tl.constexpr, QUANTIZE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """RMSNorm of one row, float32 [BLOCKS, 128] with values of type KIND. KEEP: `normed` gets it in that type;
    QUANTIZE: `out` and `scales` get the quantized form. Rows are contiguous. Returns 1 / its root mean square."""
    blocks = tl.arange(0, BLOCKS)
    cols = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    mask = cols < WIDTH
    mean = tl.sum(tl.sum(value * value, axis=1), axis=0) / WIDTH
    inverse = tl.rsqrt(mean + eps)
    value = (value * inverse).to(KIND).to(tl.float32)  # models are trained with this rounding
    value *= tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    rounded = value.to(KIND)
    if KEEP:
        tl.store(normed + row * WIDTH + cols, rounded, mask=mask)
    if QUANTIZE:
        quantized, scale = quantize_tile(rounded.to(tl.float32), POWER_OF_TWO)
        tl.store(out + row * WIDTH + cols, quantized, mask=mask)
        store_scale(scales, blocks, row, scale_stride, scale, blocks * _BLOCK < WIDTH)
    return inverse


@dependent_jit(do_not_specialize=_UNSPECIALIZED)
def rms_norm_quantize_kernel(
    x, other, residual, weight, normed, out, scales, ahead, scale_stride, eps,
    WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, BLOCKS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, KEEP: tl.constexpr, PAIR: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One row per program, as [BLOCKS, 128]; BLOCKS is a power of two. With KEEP `normed` gets the row in x's dtype;
    PAIR: of x + other, which is contiguous. AHEAD bytes of `ahead` are prefetched."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)
    cols = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    mask = cols < WIDTH
    value = tl.load(x + row * X_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    if PAIR:
        value += tl.load(other + row * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    if HAS_RESIDUAL:
        stream = residual + row * WIDTH + cols
        value += tl.load(stream, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(stream, rounded, mask=mask)
        value = rounded.to(tl.float32)
    prefetch_shared(ahead, AHEAD)
    store_norm(
        value, weight, normed, out, scales, scale_stride, eps, row, WIDTH, BLOCKS, KEEP, True, POWER_OF_TWO,
        x.dtype.element_ty,
    )  # fmt: skip


def quantize_rows(x: Tensor, power_of_two: bool = False, exponents: bool = False) -> QuantizedRows:
    """x [M, K], rows may be strided -> `QuantizedRows`. See `reference.quantize_rows`."""
    x = with_contiguous_rows(x)
    m, k = x.shape
    rows = QuantizedRows.empty(m, k, x.device, exponents=exponents)
    if m:
        quantize_kernel[_tiles(m, k)](
            x, rows.data, rows.scales, m, rows.scale_stride, WIDTH=k, X_STRIDE=_stride(x), ROWS=TILE_ROWS,
            POWER_OF_TWO=power_of_two, num_warps=4,
        )  # fmt: skip
    return rows


def silu_mul_quantize(
    gate_up: Tensor, power_of_two: bool = False, exponents: bool = False, limit: float = 0.0
) -> QuantizedRows:
    """gate_up [M, 2I], gate first -> `QuantizedRows` of silu(gate) * up [M, I], computed in float32. limit: as in
    `Ops.silu_and_mul`."""
    gate_up = with_contiguous_rows(gate_up)
    m, width = gate_up.shape[0], gate_up.shape[1] // 2
    rows = QuantizedRows.empty(m, width, gate_up.device, exponents=exponents)
    if m:
        silu_mul_quantize_kernel[_tiles(m, width)](
            gate_up, rows.data, rows.scales, m, rows.scale_stride, limit, WIDTH=width, X_STRIDE=_stride(gate_up),
            ROWS=TILE_ROWS, POWER_OF_TWO=power_of_two, CLAMP=clamp_of(limit), num_warps=4,
        )  # fmt: skip
    return rows


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, power_of_two: bool = False,
    keep: bool = True, other: Tensor | None = None, exponents: bool = False, ahead: Tensor | None = None,
) -> tuple[Tensor | None, QuantizedRows]:  # fmt: skip
    """residual += x (+ other, contiguous) in place if given (contiguous [M, K]); returns its RMSNorm (None unless
    `keep`), and the quantized form."""
    if residual is not None and not residual.is_contiguous():
        raise ValueError("rms_norm_quantize needs a contiguous residual")
    x = with_contiguous_rows(x)
    m, k = x.shape
    rows = QuantizedRows.empty(m, k, x.device, exponents=exponents)
    normed = torch.empty_like(x, memory_format=torch.contiguous_format) if keep else None
    if m:
        ahead, num_ahead = requested(ahead, IN_GAP)
        rms_norm_quantize_kernel[(m,)](
            x, other, residual, weight, normed, rows.data, rows.scales, ahead,
            rows.scale_stride, eps, AHEAD=num_ahead,
            WIDTH=k, X_STRIDE=_stride(x), BLOCKS=norm_blocks(k), HAS_RESIDUAL=residual is not None,
            POWER_OF_TWO=power_of_two, KEEP=keep, PAIR=other is not None, num_warps=norm_warps(k),
        )  # fmt: skip
    return normed, rows


def _stride(x: Tensor) -> int:
    """Row stride; that of a single row is arbitrary and must not compile a new kernel."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def _tiles(num_rows: int, width: int) -> tuple[int, int]:
    return triton.cdiv(num_rows, TILE_ROWS), triton.cdiv(width, BLOCK)


def norm_blocks(width: int) -> int:
    return triton.next_power_of_2(triton.cdiv(width, BLOCK))


def norm_warps(width: int) -> int:
    """16 to 32 channels per thread: a program has one row, so more threads hide its latency."""
    return min(16, max(1, norm_blocks(width) // 4))


def aot_cases() -> list[AotCase]:
    """DeepSeek V3's rows: hidden 7168, q latent 1536, expert width 2048, dense width 18432."""
    pointers = {"out": "*fp8e4nv", "scales": "*fp32", "scale_stride": "i32"}
    cases = []
    for width in (1536, 7168, 18432):
        constants: dict[str, Any] = {"WIDTH": width, "X_STRIDE": width, "ROWS": TILE_ROWS, "POWER_OF_TWO": False}
        signature = {"x": "*bf16", "num_rows": "i32", **pointers}
        cases.append(AotCase(f"fp8_quantize_{width}", quantize_kernel, signature, constants, 4, 3, False))
    constants, signature = constants | {"POWER_OF_TWO": True}, signature | {"scales": "*i32"}
    cases.append(AotCase("fp8_quantize_18432_exponents", quantize_kernel, signature, constants, 4, 3, False))
    for width, clamp in ((2048, False), (18432, False), (2048, True), (15360, "gelu")):
        constants = {"WIDTH": width, "X_STRIDE": 2 * width, "ROWS": TILE_ROWS, "POWER_OF_TWO": True, "CLAMP": clamp}
        suffix = "_gelu" if clamp == "gelu" else "_clamped" * bool(clamp)
        signature = {"gate_up": "*bf16", "num_rows": "i32", "limit": "fp32", **pointers}
        cases.append(
            AotCase(f"fp8_silu_mul_{width}{suffix}", silu_mul_quantize_kernel, signature, constants, 4, 3, False)
        )
    norms = (
        (1536, False, False, False),
        (1536, False, True, False),
        (7168, True, True, False),
        (7168, True, True, True),
    )
    for width, has_residual, keep, pair in norms:
        constants = {"WIDTH": width, "X_STRIDE": width, "BLOCKS": norm_blocks(width), "POWER_OF_TWO": False}
        signature = {"x": "*bf16", "weight": "*fp32", "eps": "fp32", **pointers}
        constants |= {"KEEP": keep} | ({} if keep else {"normed": None})
        signature |= {"normed": "*bf16"} if keep else {}
        constants |= {"HAS_RESIDUAL": has_residual} | ({} if has_residual else {"residual": None})
        signature |= {"residual": "*bf16"} if has_residual else {}
        constants |= {"PAIR": pair} | ({} if pair else {"other": None})
        signature |= {"other": "*bf16"} if pair else {}
        constants |= {"AHEAD": IN_GAP} if pair else {"AHEAD": 0, "ahead": None}
        signature |= {"ahead": "*fp8e4nv"} if pair else {}
        name = f"fp8_rms_norm_{width}{'' if keep else '_alone'}{'_pair' * pair}"
        cases.append(AotCase(name, rms_norm_quantize_kernel, signature, constants, norm_warps(width), 3, False))
    return cases
