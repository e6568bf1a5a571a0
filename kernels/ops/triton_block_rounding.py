"""Rows of rounded caches in Triton: norm, rotation, rounding in blocks and the write, one pass over memory.

Legend: T tokens, H heads, W channels, R rotary width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.ops.block_rounding import BLOCK, E2M1, E2M1_SMALL, E4M3, SMALL_BLOCK
from moe_engine.kernels.ops.protocol import CacheRows, RotaryTable
from moe_engine.kernels.ops.triton_e4m3 import inside
from moe_engine.kernels.quantization.triton_rows import power_of_two_above
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import UNALIGNED, element, stride_of, warps_for

_E4M3_MAX, _E2M1_MAX = tl.constexpr(448.0), tl.constexpr(6.0)
_OF_E4M3, _OF_E2M1 = tl.constexpr(1.0 / 448.0), tl.constexpr(1.0 / 6.0)
_LEAST_E4M3, _LEAST_E2M1 = tl.constexpr(1e-4), tl.constexpr(6.0 * 2.0**-126)
_LEAST_SCALE = tl.constexpr(6.0 * 2.0**-9)
_INTEGERS = tl.constexpr(12582912.0)
"""1.5 * 2^23: a float32 sum with it has no fraction, and is rounded to the nearest integer, of two to the even one."""


@triton.jit
def _to_e4m3(x):
    return inside(x, _E4M3_MAX).to(tl.float8e4nv).to(tl.float32)


@triton.jit
def _to_e2m1(x):
    """The nearest numbers of e2m1, of two the one with an even code."""
    size = tl.minimum(tl.abs(x), _E2M1_MAX)
    step = tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))
    inverse = tl.where(size < 2.0, 2.0, tl.where(size < 4.0, 1.0, 0.5))
    whole = (size * inverse + _INTEGERS) - _INTEGERS
    return tl.where(x < 0.0, -whole * step, whole * step)


@triton.jit
def rounded(blocks, KIND: tl.constexpr):
    """blocks [N, B] float32 in the format of that name, by a scale for each; see `block_rounding`."""
    most = tl.max(tl.abs(blocks), 1)
    if KIND == "e4m3":
        scale = power_of_two_above(tl.maximum(most, _LEAST_E4M3) * _OF_E4M3)
        found = _to_e4m3(tl.div_rn(blocks, scale[:, None] + tl.zeros_like(blocks)))
    elif KIND == "e2m1":
        scale = power_of_two_above(tl.maximum(most, _LEAST_E2M1) * _OF_E2M1)
        found = _to_e2m1(tl.div_rn(blocks, scale[:, None] + tl.zeros_like(blocks)))
    else:
        most = tl.maximum(most, _LEAST_SCALE)
        scale = _to_e4m3(tl.div_rn(most, tl.zeros_like(most) + _E2M1_MAX))
        found = _to_e2m1(tl.div_rn(blocks, scale[:, None] + tl.zeros_like(blocks)))
    return found * scale[:, None]


@dependent_jit(do_not_specialize_on_alignment=UNALIGNED)
def round_rows_kernel(
    x, weight, positions, cos_sin, slots, out, q, stride, head_stride, out_stride, q_stride, q_head_stride, eps,
    WIDTH: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    NORM: tl.constexpr, WRITES: tl.constexpr, QUERIES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """out[t, h] or, with WRITES, out[slots[t]] = x[t, h], normed with NORM, its last ROTARY channels rotated, rounded
    in blocks of GROUP channels (0: not rounded). QUERIES: heads of q [T, QUERIES, WIDTH] after those of x, rotated in
    place. Grid (T, H + QUERIES)."""
    wait_for_inputs()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1) - QUERIES
    if head < heads:
        _round_row(
            x + token * stride + head * head_stride, weight, cos_sin + tl.load(positions + token) * ROTARY,
            out + (tl.load(slots + token).to(tl.int64) * out_stride if WRITES else (token * heads + head) * WIDTH), eps,
            WIDTH, ROTARY, BLOCK, KIND, GROUP, NORM,
        )  # fmt: skip
    else:
        if QUERIES > 0:
            pair = tl.arange(0, PAIRS)
            turned, angles = pair < ROTARY // 2, cos_sin + tl.load(positions + token) * ROTARY + pair
            place = q + token * q_stride + (head - heads) * q_head_stride + (WIDTH - ROTARY) + 2 * pair
            first, second = tl.load(place, turned, 0.0).to(tl.float32), tl.load(place + 1, turned, 0.0).to(tl.float32)
            cos, sin = tl.load(angles, turned, 1.0), tl.load(angles + ROTARY // 2, turned, 0.0)
            tl.store(place, (first * cos - second * sin).to(q.dtype.element_ty), turned)
            tl.store(place + 1, (first * sin + second * cos).to(q.dtype.element_ty), turned)


@triton.jit
def _round_row(
    x, weight, angles, target, eps,
    WIDTH: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """A row of `round_rows_kernel`, by the cosines and sines at `angles`."""
    kind = x.dtype.element_ty
    channel = tl.arange(0, BLOCK)
    value = tl.load(x + channel, channel < WIDTH, 0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
        value = (value * scale).to(kind).to(tl.float32) * tl.load(weight + channel, channel < WIDTH, 0.0).to(tl.float32)
        value = value.to(kind).to(tl.float32)
    pair = tl.arange(0, BLOCK // 2) - (WIDTH - ROTARY) // 2
    angles, turned = angles + pair, (pair >= 0) & (pair < ROTARY // 2)
    cos, sin = tl.load(angles, turned, 1.0), tl.load(angles + ROTARY // 2, turned, 0.0)
    first, second = tl.split(tl.reshape(value, [BLOCK // 2, 2]))
    both = tl.join(first * cos - second * sin, first * sin + second * cos)
    value = tl.reshape(both, [BLOCK]).to(kind).to(tl.float32)
    if GROUP > 0:
        value = tl.reshape(rounded(tl.reshape(value, [BLOCK // GROUP, GROUP]), KIND), [BLOCK]).to(kind).to(tl.float32)
    tl.store(target + channel, value.to(target.dtype.element_ty), channel < WIDTH)


def round_rows(
    x: Tensor, norm: tuple[Tensor, float] | None, positions: Tensor, table: RotaryTable, rounding: str,
    to: CacheRows | None = None, q: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`RoundRows`. Raises ValueError for a rotary table of halves, or channels that are apart."""
    tokens, heads, width = x.shape
    if not table.interleaved or (width > 1 and x.stride(2) != 1) or (to is not None and heads != 1):
        raise ValueError("rounded rows need contiguous channels, interleaved pairs and, in a cache, one head")
    out = torch.empty(tokens, heads, width, dtype=x.dtype, device=x.device) if to is None else to.cache
    if tokens:
        weight, eps = (x, 0.0) if norm is None else norm
        slots = positions if to is None else to.slots
        constants = _constants(width, table.width, rounding, norm is not None, to is not None)
        queries, strides = (0, (0, 0)) if q is None else (q.shape[1], (stride_of(q, 0), stride_of(q, 1)))
        round_rows_kernel[(tokens, heads + queries)](
            x, weight, positions, table.cos_sin, slots, out, x if q is None else q, stride_of(x, 0), stride_of(x, 1),
            stride_of(out, 0), *strides, eps, **constants, QUERIES=queries, num_warps=warps_for(constants["BLOCK"]),
        )  # fmt: skip
    return out


def _constants(width: int, rotary: int, rounding: str, norm: bool, writes: bool) -> dict[str, Any]:
    group = SMALL_BLOCK if rounding == E2M1_SMALL else BLOCK
    return {
        "WIDTH": width, "ROTARY": rotary, "BLOCK": next_power_of_2(width), "KIND": rounding,
        "GROUP": 0 if width % group else group, "NORM": norm, "WRITES": writes,
        "PAIRS": max(1, next_power_of_2(rotary // 2)),
    }  # fmt: skip


def aot_cases() -> list[AotCase]:
    """DeepSeek V4.1: keys, entries, index keys and index queries."""
    cases = []
    for name, width, rounding, norm, writes, queries in (
        ("keys", 512, E4M3, True, True, 0), ("entries", 512, E2M1_SMALL, False, True, 0),
        ("index_keys", 128, E2M1, True, True, 0), ("index_queries", 128, E2M1, False, False, 0),
        ("keys_and_queries", 512, E4M3, True, True, 8),
    ):  # fmt: skip
        for dtype in (torch.bfloat16, torch.float32):
            kind = f"*{element(dtype)}"
            constants = _constants(width, 64, rounding, norm, writes) | {"QUERIES": queries}
            signature = {
                "x": kind, "weight": "*fp32" if norm else kind, "positions": "*i64:1", "cos_sin": "*fp32",
                "slots": "*i64:1", "out": kind, "q": kind, "eps": "fp32",
                **dict.fromkeys(("stride", "head_stride", "out_stride", "q_stride", "q_head_stride"), "i32:16"),
            }  # fmt: skip
            case = f"round_{name}_{element(dtype)}"
            cases.append(
                AotCase(case, round_rows_kernel, signature, constants, warps_for(constants["BLOCK"]), 3, False)
            )
    return cases
