"""The result of zero experts in one launch: the input times the weights of the choices that are -1, and an addend.

Legend: T tokens, D hidden, K experts per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import element, warps_for, with_contiguous_rows

_TILE = 1024
"""Channels of a program."""


@dependent_jit(do_not_specialize_on_alignment=["weights", "ids"])
def add_input_kernel(
    x, weights, ids, add, out, x_stride, add_stride, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """out[t] = add[t] + x[t] * w, w the sum of the weights of t whose id is -1. Grid (T, D / TILE)."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    known = cols < WIDTH
    choice = tl.arange(0, BLOCK_K)
    own = tl.load(ids + token * TOP_K + choice, mask=choice < TOP_K, other=0) < 0
    weight = tl.sum(tl.load(weights + token * TOP_K + choice, mask=own, other=0.0), 0)
    value = tl.load(x + token * x_stride + cols, mask=known, other=0.0).to(tl.float32) * weight
    if add is not None:
        value += tl.load(add + token * add_stride + cols, mask=known, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + cols, value.to(out.dtype.element_ty), mask=known)


def add_input(x: Tensor, weights: Tensor, ids: Tensor, add: Tensor | None = None) -> Tensor:
    """`AddInput`."""
    x, add = with_contiguous_rows(x), None if add is None else with_contiguous_rows(add)
    count, width = x.shape
    out = torch.empty(count, width, dtype=x.dtype, device=x.device)
    if count:
        add_input_kernel[(count, triton.cdiv(width, _TILE))](
            x, weights.contiguous(), ids.contiguous(), add, out, x.stride(0), 0 if add is None else add.stride(0),
            **_constants(width, ids.shape[1]), num_warps=warps_for(_TILE),
        )  # fmt: skip
    return out


def _constants(width: int, top_k: int) -> dict[str, int]:
    return {"WIDTH": width, "TOP_K": top_k, "BLOCK_K": next_power_of_2(top_k), "TILE": _TILE}


def aot_cases() -> list[AotCase]:
    """LongCat-Flash, with and without an addend, and with ids of an all-to-all."""
    cases = []
    for has_add, ids in ((False, torch.int32), (True, torch.int32), (False, torch.int64)):
        signature = {"x": "*bf16", "weights": "*fp32", "ids": f"*{element(ids)}", "out": "*bf16", "x_stride": "i32:16"}
        signature |= {"add": "*bf16", "add_stride": "i32:16"} if has_add else {}
        constants = _constants(6144, 12) | ({} if has_add else {"add": None, "add_stride": 0})
        name = f"add_input_6144_bf16{'_addend' * has_add}{'_int64' * (ids == torch.int64)}"
        cases.append(AotCase(name, add_input_kernel, signature, constants, warps_for(_TILE), 3, False))
    return cases
