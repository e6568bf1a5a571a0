"""The end of an MoE layer in one launch: the weighted sum of the experts' rows, the residual stream, and the next norm,
quantized for its consumers or not. One launch instead of two, and [T, D] is neither written nor read in between.

Legend: T tokens, K experts per token, D hidden. A row is a tile [D / 128, 128].
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.permutation.protocol import ExpertRows
from moe_engine.kernels.permutation.triton_permute import weighted_sum
from moe_engine.kernels.quantization.protocol import (
    BLOCK,
    UNQUANTIZED,
    Activation,
    ActivationFormat,
    QuantizedActivation,
    QuantizedRows,
)
from moe_engine.kernels.quantization.triton_rows import store_norm
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import row_stride, with_contiguous_rows
from moe_engine.kernels.triton.prefetch import IN_GAP, prefetch_shared, requested

_BLOCK = tl.constexpr(BLOCK)


@dependent_jit(do_not_specialize=["scale_stride"], do_not_specialize_on_alignment=["weights"])
def combine_norm_kernel(
    rows, positions, weights, add, residual, norm, normed, out, scales, ahead, scale_stride, eps,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, W_STRIDE: tl.constexpr, ADD_STRIDE: tl.constexpr, BLOCKS: tl.constexpr,
    HAS_ADD: tl.constexpr, KEEP: tl.constexpr, QUANTIZE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """One token per program: residual[t] += add[t] + sum_k weights[t, k] * rows[positions[t, k]]; KEEP: normed[t] = its
    norm; QUANTIZE: the norm as e4m3 in `out`, with scales. AHEAD bytes of `ahead` are prefetched."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)
    cols = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    mask = cols < WIDTH
    total = weighted_sum(rows, positions, weights, token, cols, TOP_K, WIDTH, W_STRIDE, True)
    if HAS_ADD:
        total += tl.load(add + token * ADD_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    stream = residual + token * WIDTH + cols
    kind = residual.dtype.element_ty
    value = total.to(kind).to(tl.float32) + tl.load(stream, mask=mask, other=0.0).to(tl.float32)
    rounded = value.to(kind)
    tl.store(stream, rounded, mask=mask)
    value = rounded.to(tl.float32)
    prefetch_shared(ahead, AHEAD)
    store_norm(
        value, norm, normed, out, scales, scale_stride, eps, token, WIDTH, BLOCKS, KEEP, QUANTIZE, POWER_OF_TWO, kind
    )  # fmt: skip


def combine_norm(
    rows: ExpertRows, residual: Tensor, weight: Tensor, eps: float, format: ActivationFormat = UNQUANTIZED,
    ahead: Tensor | None = None,
) -> Activation:  # fmt: skip
    """`OpsCapabilities.add_rows_rms_norm`, and of `QuantizedNorms`.

    Raises:
        ValueError: residual is not contiguous, or of another dtype than the rows.
    """
    if not residual.is_contiguous() or residual.dtype != rows.rows.dtype:
        raise ValueError("combine_norm needs a contiguous residual in the dtype of the rows")
    (tokens, top_k), width = rows.positions.shape, residual.shape[1]
    normed = torch.empty_like(residual) if format.unquantized else None
    quantized = QuantizedRows.empty(tokens, width, residual.device, exponents=format.exponents) if format.rows else None
    if tokens:
        weights = with_contiguous_rows(rows.weights)
        add = None if rows.add is None else with_contiguous_rows(rows.add)
        ahead, num_ahead = requested(ahead, IN_GAP)
        combine_norm_kernel[(tokens,)](
            rows.rows, rows.positions, weights, add, residual, weight, normed,
            None if quantized is None else quantized.data, None if quantized is None else quantized.scales,
            ahead, 0 if quantized is None else quantized.scale_stride, eps, AHEAD=num_ahead,
            **_constants(top_k, width, row_stride(weights), 0 if add is None else row_stride(add), add, format),
            num_warps=_warps(width),
        )  # fmt: skip
    if quantized is None:
        assert normed is not None
        return normed
    return QuantizedActivation(quantized, normed, residual.dtype)


def _constants(
    top_k: int, width: int, w_stride: int, add_stride: int, add: Any, format: ActivationFormat
) -> dict[str, Any]:
    return {
        "TOP_K": top_k, "WIDTH": width, "W_STRIDE": w_stride, "ADD_STRIDE": add_stride,
        "BLOCKS": next_power_of_2(triton.cdiv(width, BLOCK)), "HAS_ADD": add is not None, "KEEP": format.unquantized,
        "QUANTIZE": format.rows, "POWER_OF_TWO": format.power_of_two,
    }  # fmt: skip


def _warps(width: int) -> int:
    """16 channels per thread at most: a program has one row, so more threads hide its latency."""
    return min(16, max(1, next_power_of_2(triton.cdiv(width, BLOCK)) // 4))


def aot_cases() -> list[AotCase]:
    """DeepSeek-V2-Lite in bf16 and in FP8, and V3's width."""
    cases = []
    both = ActivationFormat(True, True)
    for label, width, top_k, format in (
        ("v2_lite", 2048, 6, UNQUANTIZED), ("v2_lite_fp8", 2048, 6, both), ("v3", 7168, 8, both),
        ("v3_alone", 7168, 8, ActivationFormat.fp8(True)),
    ):  # fmt: skip
        signature = {
            "rows": "*bf16", "positions": "*i32", "weights": "*fp32:1", "add": "*bf16", "residual": "*bf16",
            "norm": "*fp32", "scale_stride": "i32", "eps": "fp32",
        }  # fmt: skip
        outputs = {"normed": "*bf16"} if format.unquantized else {}
        outputs |= {"out": "*fp8e4nv", "scales": "*fp32"} if format.rows else {}
        absent = dict.fromkeys({"normed", "out", "scales"} - set(outputs))
        constants = _constants(top_k, width, top_k, width, signature, format) | absent
        constants |= {"AHEAD": 0, "ahead": None} if format.rows else {"AHEAD": IN_GAP}
        signature |= {} if format.rows else {"ahead": "*bf16"}
        name = f"combine_norm_{label}"
        cases.append(AotCase(name, combine_norm_kernel, signature | outputs, constants, _warps(width), 3, False))
    return cases
