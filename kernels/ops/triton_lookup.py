"""Rows of a rank's part of an embedding: one launch and one pass over memory, also for ids of other ranks.

Legend: T tokens, D hidden, W rows of the vocabulary on this rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import warps_for

_TILE = 1024
"""Channels of a program."""


@dependent_jit(do_not_specialize=["first", "held"], do_not_specialize_on_alignment=["ids"])
def lookup_kernel(ids, weight, out, first, held, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """out[t] = weight[ids[t] - first], or 0 for an id that is not one of the `held`. Grid (T, D / TILE)."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = tl.load(ids + token).to(tl.int64) - first
    width = tl.where((row >= 0) & (row < held), WIDTH, 0)
    value = tl.load(weight + row * WIDTH + cols, mask=cols < width, other=0.0)
    tl.store(out + token * WIDTH + cols, value, mask=cols < WIDTH)


def lookup(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    """`OpsCapabilities.lookup`."""
    ids, (held, width) = ids.contiguous(), weight.shape
    out = torch.empty(len(ids), width, dtype=weight.dtype, device=weight.device)
    if len(ids):
        lookup_kernel[(len(ids), triton.cdiv(width, _TILE))](
            ids, weight, out, first, held, WIDTH=width, TILE=_TILE, num_warps=warps_for(_TILE)
        )
    return out


def aot_cases() -> list[AotCase]:
    """DeepSeek-V3 and gpt-oss (hidden 2880)."""
    signature = {"ids": "*i64:1", "weight": "*bf16", "out": "*bf16", "first": "i32", "held": "i32"}
    return [
        AotCase(
            f"lookup_{width}_bf16", lookup_kernel, signature, {"WIDTH": width, "TILE": _TILE}, warps_for(_TILE), 3,
            False,
        )
        for width in (7168, 2880)
    ]  # fmt: skip
