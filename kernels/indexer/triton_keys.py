"""Index keys and index queries in Triton, from their products on, in one launch: LayerNorm, rotary embedding, Hadamard
transform, quantization (`index_keys`), and the write to the cache.

Legend: T tokens, Hi index heads, I channels of an index head, R rotary width; M rows of a program: keys of tokens, or
heads of queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_engine.kernels.indexer.index_keys import LEAST_MAGNITUDE
from moe_engine.kernels.indexer.key_norm import KeyNorm
from moe_engine.kernels.kv_format.formats import head_scale_offset
from moe_engine.kernels.kv_format.latent_records import LARGEST_E4M3
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.quantization.triton_rows import power_of_two_above
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import stride_of, with_contiguous_rows

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


@triton.jit
def _normed(x, column, mean, scale, weight, bias):
    """LayerNorm of x [M, .] at the channels `column`, in x's dtype."""
    centred = (x.to(tl.float32) - mean[:, None]) * scale[:, None]
    return (centred * tl.load(weight + column) + tl.load(bias + column)).to(x.dtype)


@triton.jit
def _prepared(
    rows, inside, positions, cos_sin, weight, bias, eps,
    WIDTH: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Rows [M, WIDTH] at the pointers `rows` [M]: with NORM normalized, then the first ROTARY channels rotated by the
    angles of `positions` [M]; each result rounded to the rows' dtype. A channel's partner is loaded a second time."""
    column = tl.arange(0, WIDTH)
    x = tl.load(rows[:, None] + column[None, :], inside[:, None], 0.0)
    kind = x.dtype
    mean = tl.zeros_like(positions).to(tl.float32)
    scale = mean
    if NORM:
        wide = x.to(tl.float32)
        mean = tl.sum(wide, 1) / WIDTH
        centred = wide - mean[:, None]
        scale = tl.rsqrt(tl.sum(centred * centred, 1) / WIDTH + eps)
        x = _normed(x, column, mean, scale, weight, bias)
    if ROTARY > 0:
        if INTERLEAVED:
            partner, pair, first = column ^ 1, column // 2, column % 2 == 0
        else:
            first = column < ROTARY // 2
            pair = column % (ROTARY // 2)
            partner = tl.where(first, column + ROTARY // 2, column - ROTARY // 2)
        turns = column < ROTARY
        partner, pair = tl.where(turns, partner, column), tl.where(turns, pair, 0)
        other = tl.load(rows[:, None] + partner[None, :], inside[:, None], 0.0)
        if NORM:
            other = _normed(other, partner, mean, scale, weight, bias)
        angle = cos_sin + positions.to(tl.int64)[:, None] * ROTARY + pair[None, :]
        cos, sin = tl.load(angle), tl.load(angle + ROTARY // 2)
        sign = tl.where(first, -1.0, 1.0)[None, :]
        turned = x.to(tl.float32) * cos + sign * (other.to(tl.float32) * sin)
        x = tl.where(turns[None, :], turned.to(kind), x)
    return x


@dependent_jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots", "positions"])
def index_rows_kernel(
    keys, norm_weight, norm_bias, positions, cos_sin, slots, cache, q, gates, out, folded, tokens, eps, factor,
    key_stride, cache_stride, token_stride, head_stride, part_stride, gate_stride,
    PARTS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, KEYS: tl.constexpr, FP8: tl.constexpr, HADAMARD: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """KEYS: keys [T, WIDTH] -> cache[slots], records with FP8; HEADS > 0: q [T, HEADS, WIDTH], gates [PARTS, T, HEADS]
    -> out, folded = sum of gates * factor and, with FP8, times the scales of out, both contiguous. Keys are normalized
    with NORM; keys and queries rotated. Grid: programs of the keys, then of the queries, ROWS rows each."""
    wait_for_inputs()
    program = tl.program_id(0)
    key_programs = tl.cdiv(tokens, ROWS) if KEYS else 0
    column = tl.arange(0, WIDTH)
    if program < key_programs:
        if KEYS:
            row = program * ROWS + tl.arange(0, ROWS)
            inside = row < tokens
            places = tl.zeros_like(row)
            if ROTARY > 0:
                places = tl.load(positions + row, inside, 0)
            source = keys + row.to(tl.int64) * key_stride
            x = _prepared(
                source, inside, places, cos_sin, norm_weight, norm_bias, eps, WIDTH, ROTARY, INTERLEAVED, NORM
            )
            record = tl.load(slots + row, inside, 0).to(tl.int64) * cache_stride
            target = cache + record[:, None] + column[None, :]
            if FP8:
                values, scale = _transformed(x, WIDTH, HADAMARD)
                tl.store(target, values.to(tl.uint8, bitcast=True), inside[:, None])
                tl.store(cache.to(tl.pointer_type(tl.float32)) + (record + SCALE) // 4, scale, inside)
            else:
                tl.store(target, x.to(cache.dtype.element_ty), inside[:, None])
    else:
        if HEADS > 0:
            row = (program - key_programs) * ROWS + tl.arange(0, ROWS)
            inside = row < tokens * HEADS
            token, head = (row // HEADS).to(tl.int64), row % HEADS
            places = tl.zeros_like(row)
            if ROTARY > 0:
                places = tl.load(positions + token, inside, 0)
            source = q + token * token_stride + head * head_stride
            x = _prepared(source, inside, places, cos_sin, cos_sin, cos_sin, eps, WIDTH, ROTARY, INTERLEAVED, False)
            weight = tl.zeros_like(row).to(tl.float32)
            for part in tl.static_range(PARTS):
                weight += tl.load(gates + part * part_stride + token * gate_stride + head, inside, 0.0)
            weight *= factor
            line = out + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
            if FP8:
                values, scale = _transformed(x, WIDTH, HADAMARD)
                tl.store(line, values, inside[:, None])
                weight *= scale
            else:
                tl.store(line, x, inside[:, None])
            tl.store(folded + row, weight, inside)


def prepare(
    keys: Tensor | None, norm: KeyNorm | None, q: Tensor | None, gates: Tensor | None, factor: float,
    positions: Tensor | None, table: RotaryTable | None, slots: Tensor | None, cache: Tensor | None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """`PrepareIndex`, of keys or queries or both; without `norm` or `table` unchanged by them. Queries without a cache
    are quantized."""
    given = keys if keys is not None else q
    assert given is not None
    tokens, width = len(given), given.shape[-1]
    fp8 = cache is None or cache.dtype == torch.uint8
    heads = 0 if q is None else q.shape[1]
    prepared = None
    if q is not None and gates is not None:
        q, gates = with_contiguous_rows(q), with_contiguous_rows(gates)
        out = torch.empty(q.shape, dtype=torch.float8_e4m3fn if fp8 else q.dtype, device=q.device)
        prepared = out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    keys = None if keys is None else with_contiguous_rows(keys)
    grid = triton.cdiv(tokens * heads, ROWS) + (triton.cdiv(tokens, ROWS) if keys is not None else 0)
    if tokens:
        index_rows_kernel[(grid,)](
            keys, None if norm is None else norm.weight, None if norm is None else norm.bias,
            None if positions is None else positions.reshape(-1), None if table is None else table.cos_sin,
            slots, cache, q, gates, *(prepared or (None, None)), tokens, 0.0 if norm is None else norm.eps, factor,
            0 if keys is None else stride_of(keys, 0), 0 if cache is None else cache.stride(0),
            *_strides(q, gates), PARTS=1 if gates is None else len(gates),
            **_constants(width, heads, table, norm is not None, keys is not None, fp8), num_warps=4,
        )  # fmt: skip
    return prepared


def write(keys: Tensor, slots: Tensor, cache: Tensor) -> None:
    """keys [T, I] -> records cache[slots], uint8 [num_slots, 1, bytes]."""
    prepare(keys, None, None, None, 1.0, None, None, slots, cache)


def quantize_queries(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """See `index_keys.quantize_queries`. q [T, Hi, I], weights [T, Hi] or parts of them [P, T, Hi]."""
    prepared = prepare(None, None, q, in_parts(weights), 1.0, None, None, None, None)
    assert prepared is not None
    return prepared


def in_parts(weights: Tensor) -> Tensor:
    """[T, Hi] or [P, T, Hi] -> [P, T, Hi], parts of a sum."""
    return weights if weights.dim() == 3 else weights[None]


def _strides(q: Tensor | None, gates: Tensor | None) -> tuple[int, ...]:
    """Strides of tokens and heads of q [T, Hi, I], of parts and tokens of gates [P, T, Hi]."""
    if q is None or gates is None:
        return 0, 0, 0, 0
    return stride_of(q, 0), stride_of(q, 1), stride_of(gates, 0), stride_of(gates, 1)


def _constants(
    width: int, heads: int, table: RotaryTable | None, norm: bool, keys: bool, fp8: bool = True
) -> dict[str, object]:
    return {
        "HEADS": heads, "WIDTH": width, "ROTARY": 0 if table is None else table.width,
        "INTERLEAVED": table is not None and table.interleaved, "NORM": norm, "KEYS": keys, "FP8": fp8,
        "HADAMARD": width**-0.5, "SCALE": head_scale_offset(width), "ROWS": ROWS,
    }  # fmt: skip


def aot_cases() -> list[AotCase]:
    """Cases of DeepSeek V3.2 (64 heads) and GLM-5 (32 heads, interleaved pairs)."""
    cases = []
    for heads, interleaved, fp8, parts in (
        (64, False, True, 14), (64, False, True, 1), (32, True, True, 12), (0, False, True, 1), (64, False, False, 14)
    ):  # fmt: skip
        table = RotaryTable(torch.empty(1, 64), interleaved)
        signature = {
            "keys": "*bf16", "norm_weight": "*fp32", "norm_bias": "*fp32", "positions": "*i64:1", "cos_sin": "*fp32",
            "slots": "*i64:1", "cache": "*u8" if fp8 else "*bf16", "tokens": "i32", "eps": "fp32", "factor": "fp32",
            "key_stride": "i32:16", "cache_stride": "i32" if fp8 else "i32:16",
        }  # fmt: skip
        constants = _constants(128, heads, table, True, True, fp8) | {"PARTS": parts}
        strides = ("token_stride", "head_stride", "part_stride", "gate_stride")
        if heads:
            signature |= {"q": "*bf16", "gates": "*fp32", "out": "*fp8e4nv" if fp8 else "*bf16", "folded": "*fp32"}
            signature |= dict.fromkeys(strides, "i32:16")
        else:
            constants |= dict.fromkeys(("q", "gates", "out", "folded"))
            signature |= dict.fromkeys(strides, "i32:16")  # 0
        name = f"index rows, {heads} heads, {'fp8 records' if fp8 else 'bf16'}, {parts} parts of the gates"
        cases.append(AotCase(name, index_rows_kernel, signature, constants, 4, 3, fp8))
    return cases
