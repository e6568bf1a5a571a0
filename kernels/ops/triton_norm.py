"""RMSNorm, with and without the residual add, and SiLU-mul: one pass over memory each.

Legend: N rows, D row width, I intermediate width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.gate_form import GELU, SILU, SQUARED, GatedActivation
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.clamped_gate import bound_silu, clamp_gate_up, gelu, situ, squared_relu
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import element, rows_of, stride_of, warps_for, with_contiguous_rows
from moe_engine.kernels.triton.prefetch import IN_GAP, prefetch_shared, requested

_TILE = 1024
"""Elements per program for narrow rows; wider rows have one program each."""

_SILU_BLOCK = 1024


@dependent_jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x, other, residual, weight, out, ahead,
    x_stride, x_head_stride, residual_stride, num_rows, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    PAIR: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out = rms_norm(x), or with ADD residual += x; out = rms_norm(residual). Row n of x is (n // HEADS, n % HEADS).
    PAIR: x + other instead of x; other is contiguous. AHEAD bytes of `ahead` are prefetched."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    column = tl.arange(0, BLOCK)[None, :]
    live = (row < num_rows) & (column < WIDTH)
    value = tl.load(x + (row // HEADS) * x_stride + (row % HEADS) * x_head_stride + column, live, 0.0)
    if PAIR:
        second = tl.load(other + row * WIDTH + column, live, 0.0).to(tl.float32)
        value = (value.to(tl.float32) + second).to(x.dtype.element_ty)
    if ADD:
        place = residual + row * residual_stride + column
        summed = tl.load(place, live, 0.0).to(tl.float32) + value.to(tl.float32)
        value = summed.to(residual.dtype.element_ty)
        tl.store(place, value, live)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]
    normed = (wide * scale).to(out.dtype.element_ty).to(tl.float32)  # models are trained with this rounding
    scaled = normed * tl.load(weight + column, column < WIDTH, 0.0).to(tl.float32)
    prefetch_shared(ahead, AHEAD)
    tl.store(out + row * WIDTH + column, scaled.to(out.dtype.element_ty), live)


@dependent_jit
def silu_and_mul_kernel(
    gate_up, out, stride, limit, slope, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CLAMP: tl.constexpr,
    SHIFT: tl.constexpr, SITU: tl.constexpr, SQUARED: tl.constexpr,
):  # fmt: skip
    """out [N, I] = silu(gate_up[:, :I]) * gate_up[:, I:]; the gate is rounded before the product, as in torch. CLAMP:
    with `limit`. slope: alpha with SHIFT, beta with SITU (`GatedActivation`). SQUARED: relu(up)^2 of gate_up [N, I]."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < WIDTH
    gate = tl.load(gate_up + row * stride + column, live, 0.0).to(tl.float32)
    up = gate
    if not SQUARED:
        up = tl.load(gate_up + row * stride + WIDTH + column, live, 0.0).to(tl.float32)
    if CLAMP and CLAMP != "gelu":
        gate, up = clamp_gate_up(gate, up, limit)
    kind = out.dtype.element_ty
    if SQUARED:
        mixed = squared_relu(up)
    elif SITU:
        mixed = situ(gate, up, limit, slope)
    elif CLAMP == "gelu":
        mixed = gelu(gate).to(kind).to(tl.float32) * up
    else:
        if SHIFT:
            up += 1.0
        else:
            slope = 1.0
        active = gate / (1.0 + tl.exp(-slope * gate))
        if CLAMP:
            active = bound_silu(active, limit)
        mixed = active.to(kind).to(tl.float32) * up
    tl.store(out + row * WIDTH + column, mixed.to(kind), live)


def rms_norm(x: Tensor, weight: Tensor, eps: float, ahead: Tensor | None = None) -> Tensor:
    """x [..., D] with contiguous rows, up to two leading strides -> new contiguous tensor. ahead: as in `Absorb`."""
    flat, heads, strides = rows_of(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(flat, None, out, weight, out, heads, strides, 0, eps, False, ahead)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, other: Tensor | None = None, ahead: Tensor | None = None
) -> Tensor:
    """residual [N, D] += x (+ other, contiguous) in place; returns rms_norm(residual), contiguous. Rows are contiguous
    in all."""
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    flat, heads, strides = rows_of(x)
    _launch(flat, other, residual, weight, out, heads, strides, stride_of(residual, 0), eps, True, ahead)
    return out


def _launch(
    x: Tensor, other: Tensor | None, residual: Tensor, weight: Tensor, out: Tensor,
    heads: int, strides: tuple[int, int], residual_stride: int, eps: float, add: bool,
    ahead: Tensor | None,
) -> None:  # fmt: skip
    width = weight.shape[0]
    num_rows = out.numel() // width
    if not num_rows:
        return
    rows, block, warps = _tile(width)
    ahead, num_ahead = requested(ahead, IN_GAP)
    rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x, other, residual, weight, out, ahead, *strides, residual_stride, num_rows, eps,
        HEADS=heads, WIDTH=width, ROWS=rows, BLOCK=block, ADD=add, PAIR=other is not None, AHEAD=num_ahead,
        num_warps=warps,
    )  # fmt: skip


def _tile(width: int) -> tuple[int, int, int]:
    """(rows per program, padded width, warps) for rows of `width`."""
    block = next_power_of_2(width)
    rows = max(1, _TILE // block)
    return rows, block, warps_for(rows * block)


def silu_and_mul(gate_up: Tensor, form: GatedActivation = SILU) -> Tensor:
    """gate_up [N, 2I], contiguous rows -> [N, I]."""
    gate_up = with_contiguous_rows(gate_up)
    count, width = gate_up.shape[0], gate_up.shape[1] if form.squared else gate_up.shape[1] // 2
    out = torch.empty((count, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (count, triton.cdiv(width, _SILU_BLOCK))
        silu_and_mul_kernel[grid](
            gate_up, out, stride_of(gate_up, 0), form.limit, form.alpha or form.beta, WIDTH=width,
            BLOCK=_SILU_BLOCK, **_constants_of(form), num_warps=warps_for(_SILU_BLOCK),
        )  # fmt: skip
    return out


def norm_case(
    label: str, width: int, heads: int, add: bool, dtype: torch.dtype = torch.bfloat16, pair: bool = False,
    ahead: bool = False,
) -> AotCase:  # fmt: skip
    """The specialization launched by `rms_norm` or `add_rms_norm` for rows of `width`, weights in `dtype`."""
    rows, block, warps = _tile(width)
    kind = f"*{element(dtype)}"
    signature = dict.fromkeys(("x", "residual", "weight", "out"), kind)
    strides = dict.fromkeys(("x_stride", "x_head_stride", "residual_stride"), "i32:16")
    constants: dict[str, Any] = {"HEADS": heads, "WIDTH": width, "ROWS": rows, "BLOCK": block, "ADD": add, "PAIR": pair}
    constants |= {"AHEAD": IN_GAP} if ahead else {"AHEAD": 0, "ahead": None}
    signature |= {"ahead": kind} if ahead else {}
    signature |= {"other": kind} if pair else {}
    constants |= {} if pair else {"other": None}
    signature = signature | strides | {"num_rows": "i32", "eps": "fp32"}
    name = f"{'add_' if add else ''}{'pair_' if pair else ''}rms_norm_{label}_{element(dtype)}{'_ahead' * ahead}"
    return AotCase(name, rms_norm_kernel, signature, constants, warps, 3, False)


def _constants_of(form: GatedActivation) -> dict[str, bool | str]:
    return {"CLAMP": form.clamp, "SHIFT": form.alpha > 0, "SITU": form.beta > 0, "SQUARED": form.squared}


def silu_case(label: str, width: int, form: GatedActivation = SILU) -> AotCase:
    """The specialization launched by `silu_and_mul` for I = `width`."""
    signature = {"gate_up": "*bf16", "out": "*bf16", "stride": "i32:16", "limit": "fp32", "slope": "fp32"}
    constants = {"WIDTH": width, "BLOCK": _SILU_BLOCK, **_constants_of(form)}
    clamp = "_gelu" if form == GELU else "_clamped" * bool(form.clamp)
    suffix = f"{clamp}{'_shifted' * (form.alpha > 0)}{'_situ' * (form.beta > 0)}"
    suffix += "_squared" * form.squared
    return AotCase(
        f"silu_and_mul_{label}{suffix}_bf16",
        silu_and_mul_kernel,
        signature,
        constants,
        warps_for(_SILU_BLOCK),
        3,
        False,
    )


def aot_cases() -> list[AotCase]:
    """DeepSeek-V3, DeepSeek-V2-Lite, Llama-3-8B and Qwen3 (per-head norms)."""
    hidden = [("v3", 7168), ("v2_lite", 2048), ("llama", 4096), ("odd", 1000)]
    norms = [norm_case(label, width, 1, add) for label, width in hidden for add in (False, True)]
    norms += [norm_case("v3_q_lora", 1536, 1, False), norm_case("qwen3_heads", 128, 32, False)]
    norms += [norm_case("v3", 7168, 1, True, pair=True), norm_case("v2_lite", 2048, 1, True, ahead=True)]
    norms += [norm_case("v3", 7168, 1, True, dtype) for dtype in (torch.float16, torch.float32)]
    widths = [("v3_shared", 2048), ("v3_dense", 18432), ("v2_lite_dense", 10944), ("llama", 14336)]
    silu = [silu_case(label, width) for label, width in widths]
    others = [
        silu_case("v4_shared", 2048, GatedActivation(10.0)), silu_case("m3", 3072, GatedActivation(7.0, 1.702)),
        silu_case("k3_shared", 6144, GatedActivation(25.0, beta=4.0)), silu_case("nemotron3_shared", 3712, SQUARED),
        silu_case("gemma3_12b", 15360, GELU),
    ]  # fmt: skip
    return [*norms, *silu, *others]
