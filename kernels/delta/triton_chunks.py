"""The gated delta rule of long runs in chunks: the part of a chunk that does not depend on its first state runs for all
chunks at once, the states follow chunk after chunk.

With G the sum of g within a chunk, the changes u of its c tokens solve (1 + A) u = beta (v - exp(G) k S), where
A[i, j] = beta_i exp(G_i - G_j) k_i.k_j for j < i. `system_kernel` stores (1 + A)^-1 diag(beta) and the products of
queries with keys; `states_kernel` then needs five products for a chunk:

    u = (1 + A)^-1 beta (v - exp(G) k S);   o = exp(G) q S + (q k^T exp(G_i - G_j)) u
    S <- exp(G_last) S + (exp(G_last - G) k)^T u

Sources: the UT transform of arXiv 2406.06484, section 3, with the decay of Gated DeltaNet, arXiv 2412.06464, section 3.

Legend: as in `protocol`; N chunks, c tokens of a chunk, BV columns of a value head of one program.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.delta.protocol import DeltaShape, DeltaWeights, StateRuns
from moe_engine.kernels.delta.reference import LENGTH_EPS
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.launch import element, stride_of

CHUNKS = {torch.float32: 32}
"""Tokens of a chunk by activation dtype, 64 for others: products of float32 need more registers."""
_BLOCK, _COLUMNS = 16, 32
"""Tokens of a block that is inverted by substitution; columns of a value head of a program of `states_kernel`."""


@triton.jit
def inverse_of(below, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + below)^-1 for a strictly lower matrix [CHUNK, CHUNK] of at most four blocks in each direction.

    The blocks of the diagonal by substitution, column after column, all at once: D. Then N = D (below without them)
    has no fourth power, so the inverse is (1 - N + N^2 - N^3) D."""
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    tl.static_assert(BLOCKS <= 4)
    rows, columns = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    own = rows // BLOCK == columns // BLOCK
    block = tl.sum(tl.reshape(tl.where(own, below, 0.0), (BLOCKS, BLOCK, BLOCKS, BLOCK)), 2)  # [blocks, row, column]
    row, column = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    solved = tl.where(row == column, 1.0, tl.zeros_like(block))
    for step in range(0, BLOCK - 1):
        factor = tl.sum(tl.where(column == step, block, 0.0), 2)  # [blocks, row]
        final = tl.sum(tl.where(row == step, solved, 0.0), 1)  # [blocks, column]
        solved -= factor[:, :, None] * final[:, None, :]
    first, second = tl.arange(0, BLOCKS)[:, None, None, None], tl.arange(0, BLOCKS)[None, None, :, None]
    diagonal = tl.reshape(tl.where(first == second, solved[:, :, None, :], 0.0), (CHUNK, CHUNK))
    if BLOCKS == 1:
        return diagonal
    power = tl.dot(diagonal, tl.where(own, 0.0, below), input_precision=PRECISION)
    sums = tl.where(rows == columns, 1.0, 0.0) - power
    if BLOCKS > 2:
        sums += tl.dot(sums, tl.dot(power, power, input_precision=PRECISION), input_precision=PRECISION)
    return tl.dot(sums, diagonal, input_precision=PRECISION)


@triton.jit
def system_kernel(
    taken, ba, a_log, dt_bias, bounds, solve, scores, scales, stride,
    KEY_HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, MIXED: tl.constexpr, EPS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk and value head: solve = (1 + A)^-1 diag(beta) and scores = q k^T exp(G_i - G_j), [N, Hv, c, c];
    scales [N, Hv, 4, c] float32: the factors of q and k before S, of k behind u, and exp(G_last). Grid (N, Hv)."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HEADS: tl.constexpr = KEY_HEADS * SHARED
    group, place = head // SHARED, head % SHARED
    begin, end = tl.load(bounds + 2 * chunk).to(tl.int64), tl.load(bounds + 2 * chunk + 1)
    at, key = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    live = at < end - begin
    inside = live[:, None] & (key < KEY)[None, :]
    tile = ((begin + at) * KEY_HEADS + group)[:, None] * MIXED + key[None, :]
    q, k = tl.load(taken + tile, inside, 0.0), tl.load(taken + tile + KEY, inside, 0.0)
    of_q, of_k = tl.sum(q.to(tl.float32) * q, 1), tl.sum(k.to(tl.float32) * k, 1)
    of_q = tl.rsqrt(of_q + EPS) * tl.rsqrt(tl.full((), KEY, tl.float32))
    of_k = tl.rsqrt(of_k + EPS)
    gate = ba + (begin + at) * stride + 2 * group * SHARED + place
    a = tl.load(gate + SHARED, live, 0.0).to(tl.float32) + tl.load(dt_bias + head)
    soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    beta = 1.0 / (1.0 + tl.exp(-tl.load(gate, live, 0.0).to(tl.float32)))
    beta = tl.where(live, beta.to(ba.dtype.element_ty).to(tl.float32), 0.0)
    decay = tl.where(live, -tl.exp(tl.load(a_log + head)) * soft, 0.0)
    total = tl.cumsum(decay, 0)  # G
    last = tl.sum(decay, 0)
    rows, columns = at[:, None], at[None, :]
    between = tl.exp(tl.where(columns <= rows, total[:, None] - total[None, :], float("-inf")))
    turned = tl.trans(k)
    lengths = of_k[None, :] * between
    below = tl.dot(k, turned, input_precision=PRECISION) * (beta * of_k)[:, None] * lengths
    found = inverse_of(tl.where(columns < rows, below, 0.0), CHUNK, BLOCK, PRECISION) * beta[None, :]
    target = (chunk * HEADS + head) * CHUNK
    square = target * CHUNK + rows * CHUNK + columns
    tl.store(solve + square, found.to(solve.dtype.element_ty))
    products = tl.dot(q, turned, input_precision=PRECISION) * of_q[:, None] * lengths
    tl.store(scores + square, products.to(scores.dtype.element_ty))
    factor = scales + 4 * target + at
    tl.store(factor, of_q * tl.exp(total))
    tl.store(factor + CHUNK, of_k * tl.exp(total))
    tl.store(factor + 2 * CHUNK, of_k * tl.exp(last - total))
    tl.store(factor + 3 * CHUNK, tl.exp(last) + tl.zeros_like(total))


@triton.jit
def states_kernel(
    taken, memory, out, bounds, firsts, solve, scores, scales, rows, reads,
    KEY_HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, MIXED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [T, Hv, VALUE] and the stored states of the runs that have chunks. Grid (R, Hv, VALUE / BLOCK_V)."""
    run, head = tl.program_id(0), tl.program_id(1)
    first, final = tl.load(firsts + run), tl.load(firsts + run + 1)
    if first == final:
        return
    HEADS: tl.constexpr = KEY_HEADS * SHARED
    group, place = head // SHARED, head % SHARED
    at, key = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    held = (key < KEY)[:, None] & (column < VALUE)[None, :]
    cell = key[:, None] * VALUE + column[None, :]
    state = tl.load(memory + (tl.load(reads + run) * HEADS + head) * (KEY * VALUE) + cell, held, 0.0)
    square = at[:, None] * CHUNK + at[None, :]
    kind = taken.dtype.element_ty
    for chunk in range(first, final):
        begin, end = tl.load(bounds + 2 * chunk).to(tl.int64), tl.load(bounds + 2 * chunk + 1)
        live = at < end - begin
        target = (tl.cast(chunk, tl.int64) * HEADS + head) * CHUNK
        mixed = taken + ((begin + at) * KEY_HEADS + group)[:, None] * MIXED
        inside, wide = live[:, None] & (key < KEY)[None, :], live[:, None] & (column < VALUE)[None, :]
        q = tl.load(mixed + key[None, :], inside, 0.0)
        k = tl.load(mixed + KEY + key[None, :], inside, 0.0)
        v = tl.load(mixed + 2 * KEY + place * VALUE + column[None, :], wide, 0.0).to(tl.float32)
        factor = scales + 4 * target + at
        before = state.to(kind)
        known = tl.dot(k, before, input_precision=PRECISION) * tl.load(factor + CHUNK)[:, None]
        inverse = tl.load(solve + target * CHUNK + square)
        change = tl.dot(inverse, (v - known).to(kind), input_precision=PRECISION)
        result = tl.dot(q, before, input_precision=PRECISION) * tl.load(factor)[:, None]
        products = tl.load(scores + target * CHUNK + square)
        result += tl.dot(products, change.to(kind), input_precision=PRECISION)
        place_out = ((begin + at) * HEADS + head)[:, None] * VALUE + column[None, :]
        tl.store(out + place_out, result.to(out.dtype.element_ty), wide)
        left = (change * tl.load(factor + 2 * CHUNK)[:, None]).to(kind)
        state = state * tl.load(scales + 4 * target + 3 * CHUNK) + tl.dot(tl.trans(k), left, input_precision=PRECISION)
        row = tl.load(rows + end - 1)
        if row >= 0:
            tl.store(memory + (row * HEADS + head) * (KEY * VALUE) + cell, state, held)


def run_chunks(
    taken: Tensor, ba: Tensor, weights: DeltaWeights, memory: Tensor, runs: StateRuns, shape: DeltaShape, out: Tensor,
    shortest: int,
) -> None:  # fmt: skip
    """The delta rule of runs of at least `shortest` tokens. taken [T, Hk, C] after the convolution, ba [T, 2 Hv],
    out [T, Hv, Dv]; stores states in memory."""
    size = _chunk(taken.dtype)
    chunks = runs.chunks(shortest, size)
    if not chunks.num:
        return
    heads = shape.value_heads
    solve, scores = taken.new_empty(2, chunks.num, heads, size, size).unbind()
    scales = memory.new_empty(chunks.num, heads, 4, size)
    system_kernel[(chunks.num, heads)](
        taken, ba, weights.a_log, weights.dt_bias, chunks.bounds, solve, scores, scales, stride_of(ba, 0),
        **_system_constants(shape, taken.dtype), num_warps=8, num_stages=1,
    )  # fmt: skip
    states = _states_constants(shape, taken.dtype)
    states_kernel[(len(runs.lens), heads, triton.cdiv(shape.value, states["BLOCK_V"]))](
        taken, memory, out, chunks.bounds, chunks.firsts, solve, scores, scales, runs.rows, runs.reads,
        **states, num_warps=4, num_stages=1,
    )  # fmt: skip


def _chunk(dtype: torch.dtype) -> int:
    return CHUNKS.get(dtype, 64)


def _precision(dtype: torch.dtype) -> str:
    """Precision of products of float32 values: near float32, or no worse than the activations."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def _system_constants(shape: DeltaShape, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "KEY_HEADS": shape.key_heads, "SHARED": shape.shared, "KEY": shape.key, "MIXED": shape.mixed,
        "EPS": LENGTH_EPS, "CHUNK": _chunk(dtype), "BLOCK": _BLOCK, "BLOCK_K": max(16, next_power_of_2(shape.key)),
        "PRECISION": _precision(dtype),
    }  # fmt: skip


def _states_constants(shape: DeltaShape, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "KEY_HEADS": shape.key_heads, "SHARED": shape.shared, "KEY": shape.key, "VALUE": shape.value,
        "MIXED": shape.mixed, "CHUNK": _chunk(dtype), "BLOCK_K": max(16, next_power_of_2(shape.key)),
        "BLOCK_V": min(_COLUMNS, max(16, next_power_of_2(shape.value))), "PRECISION": _precision(dtype),
    }  # fmt: skip


def chunk_cases(name: str, shape: DeltaShape, dtype: torch.dtype) -> list[AotCase]:
    """The specializations that `run_chunks` launches."""
    kind = f"*{element(dtype)}"
    table = {"bounds": "*i32", "solve": kind, "scores": kind, "scales": "*fp32"}
    system = {"taken": kind, "ba": kind, "a_log": "*fp32", "dt_bias": "*fp32", **table, "stride": "i32:16"}
    states = {"taken": kind, "memory": "*fp32", "out": kind, **table, "firsts": "*i32", "rows": "*i64", "reads": "*i64"}
    return [
        AotCase(f"delta_system_{name}", system_kernel, system, _system_constants(shape, dtype), 8, 1, True),
        AotCase(f"delta_states_{name}", states_kernel, states, _states_constants(shape, dtype), 4, 1, True),
    ]
