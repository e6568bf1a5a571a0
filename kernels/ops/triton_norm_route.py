"""Residual add, RMSNorm (quantized for its readers or not) and router of small steps: in one cooperative launch, or of
few tokens in two dependent ones.

A row's norm is (x + residual) * weight divided by its root mean square, so the router's logits need no norm: programs
compute tiles of ((x + residual) * weight) @ gate, wait for each other, then for each token store residual and norm, and
choose experts by the logits times the row's factor. The router reads rows that are rounded once, instead of before and
after the weight.

Behind a product of few rows, which announces the next launch, two dependent launches are quicker: the second takes as
long as the barrier (1.6 us and 1.5 us, both estimated), and the first starts early, which a cooperative launch cannot.
Behind a product of a library, which announces nothing, they are not: the bytes of the gate are the same in both forms.

Legend: T tokens, D hidden, E experts, K experts per token. A row is a tile [D / 128, 128].
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from moe_engine.kernels.linear.tiles import FEW_ROWS, MAX_FEW_BYTES
from moe_engine.kernels.ops.protocol import RouterSpec
from moe_engine.kernels.ops.router_kernels import all_logits, choose, logits_of_tile
from moe_engine.kernels.ops.triton_norm import add_rms_norm
from moe_engine.kernels.ops.triton_router import (
    ONE_LAUNCH_TOKENS,
    OPTIONS,
    QWEN3_MOE,
    V2,
    V2_LITE,
    V3,
    empty_choice,
    logits_plan,
    route,
    select_plan,
)
from moe_engine.kernels.quantization.protocol import (
    BLOCK,
    UNQUANTIZED,
    Activation,
    ActivationFormat,
    QuantizedActivation,
    QuantizedRows,
    unquantized,
)
from moe_engine.kernels.quantization.triton_rows import norm_blocks, rms_norm_quantize, store_norm
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.grid_barrier import resident_programs
from moe_engine.kernels.triton.launch import element, stride_of, with_contiguous_rows
from moe_engine.kernels.triton.prefetch import BESIDE_ROUTER, prefetch_shared, requested

_BLOCK = tl.constexpr(BLOCK)


@dependent_jit(do_not_specialize=["num_tokens"])
def sum_logits_kernel(
    x, residual, norm, gate, logits, ahead, x_stride, num_tokens,
    LOGITS: tl.constexpr, HIDDEN: tl.constexpr, PART: tl.constexpr, BF16X3: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """logits [P, T, LOGITS] of (x + residual) * norm, residual contiguous; AHEAD bytes of `ahead` are prefetched. Grid
    (token blocks, expert blocks, P)."""
    wait_for_inputs()
    prefetch_shared(ahead, AHEAD)
    logits_of_tile(
        x, residual, norm, gate, logits, x_stride, num_tokens, tl.program_id(0), tl.program_id(1), tl.program_id(2),
        LOGITS, HIDDEN, PART, BF16X3, EXACT, BLOCK_T, BLOCK_E, BLOCK_D, True,
    )  # fmt: skip


@dependent_jit(do_not_specialize=["num_tokens", "scale_stride", "first"], do_not_specialize_on_alignment=["real"])
def norm_route_kernel(
    x, residual, norm, normed, out, scales, gate, logits, bias, real, weights, ids, barrier, ahead,
    x_stride, scale_stride, num_tokens, eps, scale, first,
    BLOCKS: tl.constexpr, QUANTIZE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    HIDDEN: tl.constexpr, PART: tl.constexpr, BF16X3: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, GROUP_SCORE: tl.constexpr, SCORE: tl.constexpr, HAS_BIAS: tl.constexpr,
    BIAS_ON_LOGITS: tl.constexpr, RENORMALIZE: tl.constexpr, GATED: tl.constexpr, SHARED_WEIGHT: tl.constexpr,
    HELD: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, HAS_REAL: tl.constexpr,
    AHEAD: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """residual += x; normed = rms_norm(residual), with QUANTIZE also as e4m3 in `out`, with scales; weights and ids as
    of `route_kernel` for it. residual and normed are contiguous. AHEAD bytes of `ahead` are prefetched. WAITS: the
    launch computes the logits first (cooperative); else `sum_logits_kernel` has. Any one-dimensional grid."""
    wait_for_inputs(announce=not WAITS)
    prefetch_shared(ahead, AHEAD)
    if WAITS:
        all_logits(
            x, residual, norm, gate, logits, barrier, x_stride, num_tokens,
            EXPERTS + GATED, HIDDEN, PART, PARTS, BF16X3, EXACT, BLOCK_T, BLOCK_E, BLOCK_D, True,
        )  # fmt: skip
    # from here on the residual changes
    cols = tl.arange(0, BLOCKS)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    mask = cols < HIDDEN
    kind = residual.dtype.element_ty
    for token in tl.range(tl.program_id(0), num_tokens, tl.num_programs(0), num_stages=1):
        row = tl.cast(token, tl.int64)
        stream = residual + row * HIDDEN + cols
        value = tl.load(x + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        value += tl.load(stream, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(kind)
        tl.store(stream, rounded, mask=mask)
        inverse = store_norm(
            rounded.to(tl.float32), norm, normed, out, scales, scale_stride, eps, row, HIDDEN, BLOCKS, True, QUANTIZE,
            POWER_OF_TWO, kind,
        )  # fmt: skip
        choose(
            logits, bias, real, None, weights, ids, num_tokens, scale, first, row, inverse,
            PARTS, EXPERTS, GROUPS, TOP_GROUPS, TOP_K, SHARED, GROUP_SCORE, SCORE, HAS_BIAS, BIAS_ON_LOGITS,
            RENORMALIZE, GATED, SHARED_WEIGHT, HELD, BLOCK_G, BLOCK_M, BLOCK_K, HAS_REAL, False,
        )  # fmt: skip


def add_norm_route(
    format: ActivationFormat, x: Tensor, residual: Tensor, weight: Tensor, eps: float, gate: Tensor,
    bias: Tensor | None, spec: RouterSpec, barrier: Tensor, real: Tensor | None, ids_dtype: torch.dtype,
    ahead: Tensor | None = None,
) -> tuple[Activation, Tensor, Tensor]:  # fmt: skip
    """`AddNormRoute`; up to `ONE_LAUNCH_TOKENS` tokens in one launch. `barrier`: that of the router's launches.

    Raises:
        ValueError: residual is not contiguous, or an invalid router.
    """
    if not residual.is_contiguous():
        raise ValueError("add_norm_route needs a contiguous residual")
    count, hidden = residual.shape
    if not 0 < count <= ONE_LAUNCH_TOKENS:
        done = _norm(format, x, residual, weight, eps)
        return done, *route(unquantized(done), gate, bias, spec, barrier, real=real, ids_dtype=ids_dtype)
    x, device = with_contiguous_rows(x), x.device
    exact = gate.dtype == torch.bfloat16
    waits = _waits(count, hidden)
    constants, grid, warps, stages = _plan(format, spec, bias is not None, count, hidden, x.dtype, exact, real)
    normed = torch.empty_like(residual)
    rows = QuantizedRows.empty(count, hidden, device, exponents=format.exponents) if format.rows else None
    weights, ids = empty_choice(count, spec, ids_dtype, device)
    logits = torch.empty((grid[2], count, spec.num_logits), dtype=torch.float32, device=device)
    ahead, num_ahead = requested(ahead, BESIDE_ROUTER)
    if not waits:
        sum_logits_kernel[grid](
            x, residual, weight, gate, logits, ahead, stride_of(x, 0), count, **_sums(constants), AHEAD=num_ahead,
            num_warps=4, num_stages=stages,
        )  # fmt: skip
    programs = min(resident_programs(device), max(grid[0] * grid[1] * grid[2], count)) if waits else count
    norm_route_kernel[(programs,)](
        x, residual, weight, normed, None if rows is None else rows.data, None if rows is None else rows.scales, gate,
        logits, bias if spec.has_bias and bias is not None else logits, real, weights, ids, barrier if waits else None,
        ahead if waits else None, stride_of(x, 0), 0 if rows is None else rows.scale_stride, count, eps, spec.scale,
        spec.first, **constants, AHEAD=num_ahead if waits else 0, WAITS=waits, num_warps=warps, num_stages=stages,
        **(OPTIONS if waits else {}),
    )  # fmt: skip
    return normed if rows is None else QuantizedActivation(rows, normed, x.dtype), weights, ids


def _waits(count: int, hidden: int) -> bool:
    """Whether the launch is a cooperative one: where the product before it, taken as square, announces nothing. It is
    attention's output projection, whose rows are mostly at least as wide as its results."""
    return count > FEW_ROWS or 2 * hidden * hidden > MAX_FEW_BYTES


def _norm(format: ActivationFormat, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Activation:
    if not format.rows:
        return add_rms_norm(x, residual, weight, eps)
    normed, rows = rms_norm_quantize(x, weight, eps, residual, format.power_of_two)
    return QuantizedActivation(rows, normed, x.dtype)


def _plan(
    format: ActivationFormat, spec: RouterSpec, has_bias: bool, count: int, hidden: int, dtype: torch.dtype,
    exact: bool, real: Tensor | None,
) -> tuple[dict[str, Any], tuple[int, int, int], int, int]:  # fmt: skip
    """(constants, grid of the logits, warps, stages). 32 channels of a row per thread: more spill."""
    logits, grid, warps, stages = logits_plan(count, hidden, spec.num_logits, dtype, exact=exact)
    choice = select_plan(spec, grid[2], spec.has_bias and has_bias, real is not None)
    norm = {"BLOCKS": norm_blocks(hidden), "QUANTIZE": format.rows, "POWER_OF_TWO": format.power_of_two}
    return norm | logits | choice, grid, max(warps, norm_blocks(hidden) // 8), stages


def _sums(constants: dict[str, Any]) -> dict[str, Any]:
    """Constants of `sum_logits_kernel`."""
    names = ("HIDDEN", "PART", "BF16X3", "EXACT", "BLOCK_T", "BLOCK_E", "BLOCK_D")
    return {"LOGITS": constants["EXPERTS"] + constants["GATED"]} | {name: constants[name] for name in names}


def norm_route_cases(
    label: str, hidden: int, spec: RouterSpec, count: int, format: ActivationFormat = UNQUANTIZED,
    dtype: torch.dtype = torch.bfloat16, exact: bool = True, has_real: bool = False,
    ids_dtype: torch.dtype = torch.int32, num_ahead: int = 0,
) -> list[AotCase]:  # fmt: skip
    """The specializations launched by `add_norm_route` for `count` tokens. num_ahead: bytes of a weight that it
    prefetches."""
    real, waits = torch.empty(0) if has_real else None, _waits(count, hidden)
    constants, _, warps, stages = _plan(format, spec, spec.has_bias, count, hidden, dtype, exact, real)
    kind, wgmma = f"*{element(dtype)}", dtype == torch.bfloat16
    signature = dict.fromkeys(("x", "residual", "normed"), kind) | {
        "norm": "*fp32", "gate": "*bf16" if exact else "*fp32", "logits": "*fp32", "bias": "*fp32", "weights": "*fp32",
        "ids": f"*{element(ids_dtype)}", "barrier": "*i64", "x_stride": "i32:16", "scale_stride": "i32",
        "num_tokens": "i32", "eps": "fp32", "scale": "fp32", "first": "i32",
    }  # fmt: skip
    name = f"{label}_{count}_{element(dtype)}{'_masked' * has_real}"
    name += f"{'_fp8' * format.rows}{'_split_gate' * (not exact)}{'_int64' * (ids_dtype == torch.int64)}"
    requests = {"AHEAD": num_ahead} | ({} if num_ahead else {"ahead": None})
    requested = {"ahead": kind} if num_ahead else {}
    cases = []
    if not waits:
        names = ("x", "residual", "norm", "gate", "logits", "x_stride", "num_tokens")
        sums = {name: signature[name] for name in names} | requested
        label = f"sum_logits_{name}{'_ahead' * bool(num_ahead)}"
        cases.append(AotCase(label, sum_logits_kernel, sums, _sums(constants) | requests, 4, stages, wgmma))
        requests, requested = {"AHEAD": 0, "ahead": None, "barrier": None}, {}
        del signature["barrier"]
    signature |= {"out": "*fp8e4nv", "scales": "*fp32"} if format.rows else {}
    constants |= {} if format.rows else {"out": None, "scales": None}
    signature |= requested | ({"real": "*i32:1"} if has_real else {})
    constants |= requests | {"WAITS": waits} | ({} if has_real else {"real": None})
    name = f"norm_route_{name}{'_ahead' * bool(num_ahead)}"
    options = OPTIONS if waits else {}
    cases.append(AotCase(name, norm_route_kernel, signature, constants, warps, stages, waits and wgmma, options))
    return cases


def aot_cases() -> list[AotCase]:
    """DeepSeek-V3 in FP8 as its tokens travel, V2 and V2-Lite, for one token and some; Qwen3 in FP8 for one."""
    both, cases = ActivationFormat(True, True, True), []
    for count in (1, 128):
        cases += norm_route_cases("v3", 7168, V3, count, both, has_real=True, ids_dtype=torch.int64)
        cases += norm_route_cases("v2", 5120, V2, count)
        cases += norm_route_cases("v2_lite", 2048, V2_LITE, count, has_real=True)
        cases += norm_route_cases("v2_lite", 2048, V2_LITE, count, has_real=True, num_ahead=BESIDE_ROUTER)
    cases += norm_route_cases("qwen3", 2048, QWEN3_MOE, 1, both)
    cases += norm_route_cases("v3", 7168, V3, 128, both, exact=False, num_ahead=BESIDE_ROUTER)
    return cases + norm_route_cases("v3", 7168, V3, 128, both, torch.float32, exact=False)
