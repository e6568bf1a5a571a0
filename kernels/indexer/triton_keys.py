"""FP8 index keys and index queries in Triton: Hadamard transform and quantization in one launch (`index_keys`).

Legend: N rows (index keys of tokens, or heads of index queries), I channels of an index head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_engine.kernels.indexer.index_keys import LEAST_MAGNITUDE
from moe_engine.kernels.kv_format.formats import head_scale_offset
from moe_engine.kernels.kv_format.latent_records import LARGEST_E4M3
from moe_engine.kernels.quantization.triton_rows import power_of_two_above
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import element

ROWS = 16
"""Rows of a program: the minimum of a matrix product."""

_LARGEST, _LEAST = tl.constexpr(LARGEST_E4M3), tl.constexpr(LEAST_MAGNITUDE)


@triton.jit
def _transformed(x, WIDTH: tl.constexpr, FACTOR: tl.constexpr):
    """x [M, WIDTH] times the Hadamard matrix: (e4m3 values, scales [M]). The matrix is +-1: products are exact. Float32
    numbers are three bf16 pieces."""
    row, column = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    odd = row & column  # the sign is the parity of its bits
    odd ^= odd >> 8
    odd ^= odd >> 4
    odd ^= odd >> 2
    odd ^= odd >> 1
    signs = tl.where((odd & 1) == 0, 1.0, -1.0)
    if x.dtype == tl.float32:
        signs = signs.to(tl.bfloat16)
        first = x.to(tl.bfloat16)
        rest = x - first.to(tl.float32)
        second = rest.to(tl.bfloat16)
        third = (rest - second.to(tl.float32)).to(tl.bfloat16)
        spread = tl.dot(first, signs, tl.dot(second, signs, tl.dot(third, signs)))
    else:
        spread = tl.dot(x, signs.to(x.dtype))
    spread *= FACTOR
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(spread), axis=1), _LEAST), _LARGEST)
    scale = power_of_two_above(scale)
    return (spread * tl.div_rn(1.0, scale)[:, None]).to(tl.float8e4nv), scale


@dependent_jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots"])
def keys_kernel(
    keys, slots, cache, count, key_stride, cache_stride,
    WIDTH: tl.constexpr, FACTOR: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """keys [T, WIDTH] -> records cache[slots], bytes; grid (T / ROWS)."""
    wait_for_inputs()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, column = row < count, tl.arange(0, WIDTH)
    x = tl.load(keys + row.to(tl.int64)[:, None] * key_stride + column[None, :], inside[:, None], 0.0)
    values, scale = _transformed(x, WIDTH, FACTOR)
    record = tl.load(slots + row, inside, 0).to(tl.int64) * cache_stride
    tl.store(cache + record[:, None] + column[None, :], values.to(tl.uint8, bitcast=True), inside[:, None])
    tl.store(cache.to(tl.pointer_type(tl.float32)) + (record + SCALE) // 4, scale, inside)


@dependent_jit(do_not_specialize=["count"])
def queries_kernel(
    q, weights, out, folded, count, token_stride, head_stride, weight_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, FACTOR: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """q [T, HEADS, WIDTH], weights [T, HEADS] -> out e4m3, folded = weights * scales, both contiguous."""
    wait_for_inputs()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, column = row < count, tl.arange(0, WIDTH)
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    place = q + token[:, None] * token_stride + head[:, None] * head_stride + column[None, :]
    values, scale = _transformed(tl.load(place, inside[:, None], 0.0), WIDTH, FACTOR)
    tl.store(out + row.to(tl.int64)[:, None] * WIDTH + column[None, :], values, inside[:, None])
    weight = tl.load(weights + token * weight_stride + head, inside, 0.0)
    tl.store(folded + row, weight * scale, inside)


def write(keys: Tensor, slots: Tensor, cache: Tensor) -> None:
    """keys [T, I] -> records cache[slots], uint8 [num_slots, 1, bytes]."""
    count, width = keys.shape
    if not count:
        return
    keys_kernel[(triton.cdiv(count, ROWS),)](
        keys, slots, cache, count, keys.stride(0), cache.stride(0), **_constants(width),
        SCALE=head_scale_offset(width), num_warps=4,
    )  # fmt: skip


def quantize_queries(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """See `index_keys.quantize_queries`. q [T, Hi, I] with contiguous channels, weights [T, Hi]."""
    tokens, heads, width = q.shape
    out = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
    folded = torch.empty(weights.shape, dtype=torch.float32, device=q.device)
    count = tokens * heads
    if count:
        queries_kernel[(triton.cdiv(count, ROWS),)](
            q, weights, out, folded, count, q.stride(0), q.stride(1), weights.stride(0), HEADS=heads,
            **_constants(width), num_warps=4,
        )  # fmt: skip
    return out, folded


def _constants(width: int) -> dict[str, object]:
    return {"WIDTH": width, "FACTOR": width**-0.5, "ROWS": ROWS}


def aot_cases() -> list[AotCase]:
    cases = []
    for dtype in (torch.bfloat16, torch.float32):
        kind, constants = element(dtype), _constants(128)
        keys = {
            "keys": f"*{kind}", "slots": "*i64:1", "cache": "*u8", "count": "i32", "key_stride": "i32:16",
            "cache_stride": "i32",
        }  # fmt: skip
        queries = {
            "q": f"*{kind}", "weights": "*fp32", "out": "*fp8e4nv", "folded": "*fp32", "count": "i32",
            "token_stride": "i32:16", "head_stride": "i32:16", "weight_stride": "i32:16",
        }  # fmt: skip
        cases += [
            AotCase(f"index keys, {kind}", keys_kernel, keys, constants | {"SCALE": 128}, 4, 3, True),
            AotCase(f"index queries, {kind}", queries_kernel, queries, constants | {"HEADS": 64}, 4, 3, True),
        ]
    return cases
