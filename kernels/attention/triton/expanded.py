"""Varlen attention over expanded keys and values: MLA's form for prompts, and its log-sum-exp.

A program has M query tokens of one head and loops over the keys they see. The keys may be a context chunk (expanded
separately): chunk results are merged by `triton.merge.merge_chunk`.

Legend: T query tokens, H heads, S keys of all requests, N qk_nope, P rotary width, V v_head, B blocks of M tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.attention.schedule import RECORD
from moe_engine.kernels.attention.triton.tiles import LOG2_E, LOWEST, columns, finish, softmax_step
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.launch import element

_RECORD, _LN_2 = tl.constexpr(RECORD), tl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class ExpandedTile:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


WIDE_HEAD = 128
"""Channels of a head, rotary ones not counted, above which tiles have fewer rows and stages: two of 256 take the shared
memory of three of 128."""


def expanded_tile(dtype: torch.dtype, nope: int, value: int) -> ExpandedTile:
    """The tile for heads of these widths; chosen to fit registers and shared memory of sm_90 and sm_100, not by
    measurement."""
    if dtype == torch.float32:
        return ExpandedTile(16, 32, 4, 2)
    return ExpandedTile(128, 64, 8, 3) if max(nope, value) <= WIDE_HEAD else ExpandedTile(64, 64, 8, 2)


def blocks(
    query_lens: Sequence[int], key_lens: Sequence[int], seen_by_first: Sequence[int], block_m: int
) -> np.ndarray:
    """The records of a launch [B, 8], most work first: first query token, query tokens from there to the request's
    last, first key, number of keys, keys that the block's first token sees.

    Args:
        key_lens: keys of each request, in order.
        seen_by_first: keys visible to the request's first query token (the next token sees one more); may be
            negative or above the number (a chunk after, or before, the tokens).
    """
    queries, keys = np.asarray(query_lens, dtype=np.int64), np.asarray(key_lens, dtype=np.int64)
    seen = np.asarray(seen_by_first, dtype=np.int64)
    count = -(-queries // block_m)
    request = np.repeat(np.arange(len(queries)), count)
    first = (np.arange(len(request)) - np.repeat(np.cumsum(count) - count, count)) * block_m
    records = np.zeros((len(request), RECORD), dtype=np.int32)
    records[:, 0] = (np.cumsum(queries) - queries)[request] + first
    records[:, 1] = queries[request] - first
    records[:, 2] = (np.cumsum(keys) - keys)[request]
    records[:, 3] = keys[request]
    records[:, 4] = seen[request] + first
    work = np.minimum(records[:, 3], records[:, 4])
    return records[np.argsort(-work, kind="stable")]


@triton.jit
def _attend(
    q_nope, q_rotary, kv, rope, begin, stop, num_keys, limit, best, total, mixed, kv_stride, rope_stride, scale,
    NOPE: tl.constexpr, BLOCK_NOPE: tl.constexpr, ROTARY: tl.constexpr, BLOCK_ROTARY: tl.constexpr,
    VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Updates the running softmax with keys [begin, stop); not MASKED: all tokens see all of these keys."""
    inside = tl.arange(0, BLOCK_N)
    for start in range(begin, stop, BLOCK_N):
        key = inside
        if MASKED:
            key = tl.minimum(inside, num_keys - 1 - start)  # repeats the last key: finite where scores are masked
        kv_tile = kv + start * kv_stride.to(tl.int64)
        rotary = columns(rope + start * rope_stride.to(tl.int64), key * rope_stride, 0, ROTARY, BLOCK_ROTARY,
                         ROTARY != BLOCK_ROTARY)  # fmt: skip
        scores = tl.dot(q_rotary, tl.trans(rotary), input_precision=PRECISION)
        nope = columns(kv_tile, key * kv_stride, 0, NOPE, BLOCK_NOPE, NOPE != BLOCK_NOPE)
        scores = tl.dot(q_nope, tl.trans(nope), scores, input_precision=PRECISION)
        if MASKED:
            position = start + inside
            seen = position[None, :] < tl.minimum(limit, num_keys)[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        weights, best, total, decay = softmax_step(scores, best, total, scale)
        value = columns(kv_tile + NOPE, key * kv_stride, 0, VALUE, BLOCK_VALUE, VALUE != BLOCK_VALUE)
        mixed = tl.dot(weights.to(value.dtype), value, mixed * decay[:, None], input_precision=PRECISION)
    return best, total, mixed


@triton.jit(do_not_specialize_on_alignment=["records"])
def expanded_kernel(
    q, kv, rope, out, lse, records,
    q_token_stride, q_head_stride, kv_stride, kv_head_stride, rope_stride, scale,
    NOPE: tl.constexpr, BLOCK_NOPE: tl.constexpr, ROTARY: tl.constexpr, BLOCK_ROTARY: tl.constexpr,
    VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """q [T, H, N+P], kv [S, H, N+V], rope [S, P] -> out [T, H, V], lse [T, H] (natural). `scale` includes log2(e)."""
    head, heads = tl.program_id(0), tl.num_programs(0)
    record = records + tl.program_id(1) * _RECORD
    token, left = tl.load(record).to(tl.int64), tl.load(record + 1)
    first_key, num_keys = tl.load(record + 2).to(tl.int64), tl.load(record + 3)
    seen = tl.load(record + 4)
    row = tl.arange(0, BLOCK_M)
    place = tl.minimum(row, left - 1) * q_token_stride
    q_head = q + token * q_token_stride + head * q_head_stride
    q_nope = columns(q_head, place, 0, NOPE, BLOCK_NOPE, NOPE != BLOCK_NOPE)
    q_rotary = columns(q_head + NOPE, place, 0, ROTARY, BLOCK_ROTARY, ROTARY != BLOCK_ROTARY)
    kv_head = kv + first_key * kv_stride + head * kv_head_stride
    rope_first = rope + first_key * rope_stride
    limit = seen + row
    best = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
    common = tl.maximum(tl.minimum(seen, num_keys), 0) // BLOCK_N * BLOCK_N  # keys that all tokens of the block see
    stop = tl.minimum(num_keys, seen + tl.minimum(left, BLOCK_M) - 1)
    best, total, mixed = _attend(
        q_nope, q_rotary, kv_head, rope_first, 0, common, num_keys, limit, best, total, mixed, kv_stride, rope_stride,
        scale, NOPE, BLOCK_NOPE, ROTARY, BLOCK_ROTARY, VALUE, BLOCK_VALUE, BLOCK_N, False, PRECISION,
    )  # fmt: skip
    best, total, mixed = _attend(
        q_nope, q_rotary, kv_head, rope_first, common, stop, num_keys, limit, best, total, mixed, kv_stride,
        rope_stride, scale, NOPE, BLOCK_NOPE, ROTARY, BLOCK_ROTARY, VALUE, BLOCK_VALUE, BLOCK_N, True, PRECISION,
    )  # fmt: skip
    norm, log_sum = finish(best, total)
    out_row = (token + row) * heads + head
    column = tl.arange(0, BLOCK_VALUE)
    live = (row < left)[:, None] & (column < VALUE)[None, :]
    mixed = (mixed * norm[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_row[:, None] * VALUE + column[None, :], mixed, live)
    tl.store(lse + out_row, log_sum * _LN_2, row < left)


def expanded_attention(
    q: Tensor, kv: Tensor, rope: Tensor, records: Tensor, tile: ExpandedTile, scale: float
) -> tuple[Tensor, Tensor]:
    """q [T, H, N+P], kv [S, H, N+V] (keys first), rope [S, P] -> out [T, H, V], lse [T, H] float32, natural logarithm.

    A token that sees none of the keys has output 0 and lse -inf.

    Args:
        records: [B, 8] int32, from `blocks` with the tile's block_m.

    Raises:
        ValueError: if dtypes differ.
    """
    num_tokens, heads, width = q.shape
    rotary = rope.shape[1]
    nope = width - rotary
    value = kv.shape[2] - nope
    if kv.dtype != q.dtype or rope.dtype != q.dtype:
        raise ValueError(f"queries are {q.dtype}, keys {kv.dtype}, rotary channels {rope.dtype}")
    q, kv, rope = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, kv, rope))
    out = q.new_empty(num_tokens, heads, value)
    lse = q.new_empty(num_tokens, heads, dtype=torch.float32)
    if num_tokens:
        expanded_kernel[(heads, len(records))](
            q, kv, rope, out, lse, records, q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), rope.stride(0),
            scale * LOG2_E, **_constants(nope, rotary, value, tile, q.dtype),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out, lse


def _constants(nope: int, rotary: int, value: int, tile: ExpandedTile, dtype: torch.dtype) -> dict[str, object]:
    padded = [max(16, next_power_of_2(width)) for width in (nope, rotary, value)]
    return {
        "NOPE": nope, "BLOCK_NOPE": padded[0], "ROTARY": rotary, "BLOCK_ROTARY": padded[1], "VALUE": value,
        "BLOCK_VALUE": padded[2], "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "ieee",
    }  # fmt: skip


def aot_cases() -> list[AotCase]:
    """DeepSeek V2, V2-Lite and V3: heads of 192 and 128; GLM-4.7-Flash and GLM-5: of 256."""
    return [*cases_of("heads of 192 and 128", 128, 64, 128), *cases_of("heads of 256", 192, 64, 256)[:2]]


def cases_of(heads: str, nope: int, rotary: int, value: int) -> list[AotCase]:
    """Ahead-of-time cases of the kernel for heads of these widths."""
    cases = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tile, kind = expanded_tile(dtype, nope, value), f"*{element(dtype)}"
        strides = ("q_token", "q_head", "kv", "kv_head", "rope")
        signature = {
            **dict.fromkeys(("q", "kv", "rope", "out"), kind), "lse": "*fp32", "records": "*i32:1",
            **{f"{name}_stride": "i32:16" for name in strides}, "scale": "fp32",
        }  # fmt: skip
        constants = _constants(nope, rotary, value, tile, dtype)
        name = f"expanded attention, {heads}, {element(dtype)}"
        cases.append(AotCase(name, expanded_kernel, signature, constants, tile.num_warps, tile.num_stages, True))
    return cases
