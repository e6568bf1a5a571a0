"""`AddLayerNorm` in one launch.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import stride_of, warps_for, with_contiguous_rows


@dependent_jit
def layer_norm_kernel(
    x, residual, weight, bias, out, x_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """A row of the residual: with ADD += x; out is its LayerNorm. Grid (T,)."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < WIDTH
    place = residual + row * WIDTH + column
    value = tl.load(place, live, 0.0)
    if ADD:
        summed = value.to(tl.float32) + tl.load(x + row * x_stride + column, live, 0.0).to(tl.float32)
        value = summed.to(residual.dtype.element_ty)
        tl.store(place, value, live)
    wide = value.to(tl.float32)
    centered = tl.where(live, wide - tl.sum(wide, 0) / WIDTH, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, 0) / WIDTH + eps)
    scaled = centered * scale * tl.load(weight + column, live, 0.0)
    if BIASED:
        scaled += tl.load(bias + column, live, 0.0)
    tl.store(out + row * WIDTH + column, scaled.to(out.dtype.element_ty), live)


def add_layer_norm(x: Tensor | None, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`AddLayerNorm`."""
    count, width = residual.shape
    out, added = torch.empty_like(residual), residual if x is None else with_contiguous_rows(x)
    if count:
        constants, warps = _plan(width, x is not None, bias is not None)
        layer_norm_kernel[(count,)](
            added, residual, weight, weight if bias is None else bias, out, stride_of(added, 0), eps, **constants,
            num_warps=warps,
        )  # fmt: skip
    return out


def _plan(width: int, add: bool, biased: bool) -> tuple[dict[str, Any], int]:
    block = next_power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, "ADD": add, "BIASED": biased}, warps_for(block)


def aot_cases() -> list[AotCase]:
    """Phi-3.5-MoE, the first norm and the others; the indexer's input of Mistral Large 4; Command A and R7B, without
    biases."""
    signature = dict.fromkeys(("x", "residual", "out"), "*bf16") | dict.fromkeys(("weight", "bias"), "*fp32")
    signature |= {"x_stride": "i32:16", "eps": "fp32"}
    biased = ((4096, False), (4096, True), (6144, False))
    plans = [(width, add, True, *_plan(width, add, True)) for width, add in biased]
    plans += [(width, add, False, *_plan(width, add, False)) for width in (4096, 12288) for add in (False, True)]
    return [
        AotCase(
            f"{'add_' * add}layer_norm{'' if has_bias else '_unbiased'}_{width}_bf16", layer_norm_kernel, signature,
            constants, warps, 3, False,
        )
        for width, add, has_bias, constants, warps in plans
    ]  # fmt: skip
