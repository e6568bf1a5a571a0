"""The gated delta rule of long runs in chunks: the part of a chunk that does not depend on its first state runs for all
chunks in one launch, the states follow chunk after chunk.

With G the sum of g within a chunk, the changes u of its c tokens solve (1 + A) u = beta (v - exp(G) k S), where
A[i, j] = beta_i exp(G_i - G_j) k_i.k_j for j < i. `system_kernel` stores (1 + A)^-1 diag(beta) and the products of
queries with keys; `states_kernel` then needs five products for a chunk:

    u = (1 + A)^-1 beta (v - exp(G) k S);   o = exp(G) q S + (q k^T exp(G_i - G_j)) u
    S <- exp(G_last) S + (exp(G_last - G) k)^T u

With a decay for each channel, exp(G_i - G_j) is within the sums over channels. Its two factors may overflow, so that
pairs of tokens in a block take the difference, and pairs of blocks relate both factors to the first token of the later
block: then none is over 1. `system_kernel` then stores q and k with their factors for `states_kernel`.

An additive state needs no inverse: u is v, and its step width is a factor of its products (`additive_kernel`).

Sources: the UT transform of arXiv 2406.06484, section 3, with the decay of Gated DeltaNet, arXiv 2412.06464, section 3.

Legend: as in `protocol`; N chunks, c tokens of a chunk, BV columns of a value head of one program. B_BETWEEN,
A_BETWEEN: strides of the key heads of b and a.
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
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import element, stride_of

CHUNKS = {torch.float32: 32}
"""Tokens of a chunk by activation dtype, for others 64, or 32 with a decay for each channel: products of float32 need
more registers, as do decays of channels."""
_BLOCK, _COLUMNS = 16, 32
"""Tokens of a block that is inverted by substitution; columns of a value head of a program of `states_kernel`."""


@triton.jit
def inverse_of(below, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + below)^-1 for a strictly lower matrix [CHUNK, CHUNK] of at most four blocks in each direction.

    The blocks of the diagonal by substitution, column after column, all blocks together: D. Then N = D (below without
    them) has no fourth power, so the inverse is (1 - N + N^2 - N^3) D."""
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
def log_decay(x, rate, BOUND: tl.constexpr):
    """The log decay of x = a + dt_bias, with rate = exp(a_log)."""
    if BOUND != 0.0:
        return BOUND / (1.0 + tl.exp(-rate * x))
    return -rate * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def step_width(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """The step width of x = a + dt_bias, for states without the delta rule."""
    width = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return tl.minimum(tl.maximum(width, LOW), HIGH)


@triton.jit
def products_by_channel(
    q, k, total, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Sums over channels of q_i k_j exp(G_i - G_j), and of k_i k_j exp(G_i - G_j), [CHUNK, CHUNK], for j <= i; of q, k
    and G = total [CHUNK, BLOCK_K]."""
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    block = tl.arange(0, CHUNK)[:, None] // BLOCK
    of_q, of_k = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    for later in tl.static_range(1, BLOCKS):
        first = tl.sum(tl.where(tl.arange(0, CHUNK)[:, None] == later * BLOCK, total, 0.0), 0)[None, :]
        since = tl.where(block == later, tl.exp(tl.minimum(total - first, 0.0)), 0.0)
        until = tl.where(block < later, tl.exp(tl.minimum(first - total, 0.0)), 0.0)
        turned = tl.trans((k * until).to(q.dtype))
        of_q += tl.dot((q * since).to(q.dtype), turned, input_precision=PRECISION)
        of_k += tl.dot((k * since).to(q.dtype), turned, input_precision=PRECISION)
    shape: tl.constexpr = (BLOCKS, BLOCK, BLOCK_K)
    queries, keys = tl.reshape(q.to(tl.float32), shape), tl.reshape(k.to(tl.float32), shape)
    sums = tl.reshape(total, shape)
    row, column = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    own_q, own_k = tl.zeros((BLOCKS, BLOCK, BLOCK), tl.float32), tl.zeros((BLOCKS, BLOCK, BLOCK), tl.float32)
    for step in range(0, BLOCK):
        key = tl.sum(tl.where(row == step, keys, 0.0), 1)[:, None, :]
        begin = tl.sum(tl.where(row == step, sums, 0.0), 1)[:, None, :]
        key *= tl.exp(tl.minimum(sums - begin, 0.0))
        own_q = tl.where(column == step, tl.sum(queries * key, 2)[:, :, None], own_q)
        own_k = tl.where(column == step, tl.sum(keys * key, 2)[:, :, None], own_k)
    first, second = tl.arange(0, BLOCKS)[:, None, None, None], tl.arange(0, BLOCKS)[None, None, :, None]
    of_q += tl.reshape(tl.where(first == second, own_q[:, :, None, :], 0.0), (CHUNK, CHUNK))
    of_k += tl.reshape(tl.where(first == second, own_k[:, :, None, :], 0.0), (CHUNK, CHUNK))
    return of_q, of_k


@triton.jit
def store_scaled(cell, next, live, q, k, of_q, of_k, total, last):
    """q and k with their factors for products with S, and k with that for products with u, `next` cells apart."""
    grown = tl.exp(total)
    tl.store(cell, (q * of_q * grown).to(cell.dtype.element_ty), live)
    tl.store(cell + next, (k * of_k * grown).to(cell.dtype.element_ty), live)
    tl.store(cell + 2 * next, (k * of_k * tl.exp(last - total)).to(cell.dtype.element_ty), live)


@triton.jit
def system_kernel(
    taken, b, a, a_log, dt_bias, bounds, solve, scores, scales, scaled, b_stride, a_stride,
    KEY_HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, MIXED: tl.constexpr, EPS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    DECAYS: tl.constexpr, BLOCK_W: tl.constexpr, BOUND: tl.constexpr,
    B_BETWEEN: tl.constexpr, A_BETWEEN: tl.constexpr,
):  # fmt: skip
    """One chunk and value head: solve = (1 + A)^-1 diag(beta) and scores = q k^T exp(G_i - G_j), [N, Hv, c, c];
    scales [N, Hv, 4, c] float32: the factors of q and k for S, of k for u, and exp(G_last). With a decay for each
    channel: scaled [N, Hv, 3, c, KEY], q and k with these factors, and scales [N, Hv, KEY] = exp(G_last).
    Grid (N, Hv)."""
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
    beta = tl.load(b + (begin + at) * b_stride + group * B_BETWEEN + place, live, 0.0).to(tl.float32)
    beta = 1.0 / (1.0 + tl.exp(-beta))
    beta = tl.where(live, beta.to(b.dtype.element_ty).to(tl.float32), 0.0)
    channel = tl.arange(0, BLOCK_W)
    held = live[:, None] & (channel < DECAYS)[None, :]
    gate = a + (begin + at)[:, None] * a_stride + group * A_BETWEEN + place * DECAYS + channel[None, :]
    bias = tl.load(dt_bias + head * DECAYS + channel, channel < DECAYS, 0.0)[None, :]
    decay = log_decay(tl.load(gate, held, 0.0).to(tl.float32) + bias, tl.exp(tl.load(a_log + head)), BOUND)
    decay = tl.where(held, decay, 0.0)
    rows, columns = at[:, None], at[None, :]
    target = (chunk * HEADS + head) * CHUNK
    if DECAYS == 1:
        decay = tl.sum(decay, 1)  # Triton 3.6 cannot scan a tile of one column
        sums, final = tl.cumsum(decay, 0), tl.sum(decay, 0)  # G
        between = tl.exp(tl.where(columns <= rows, sums[:, None] - sums[None, :], float("-inf")))
        turned = tl.trans(k)
        queries = tl.dot(q, turned, input_precision=PRECISION) * between
        keys = tl.dot(k, turned, input_precision=PRECISION) * between
    else:
        total, last = tl.cumsum(decay, 0), tl.sum(decay, 0)
        cell = scaled + (3 * target + rows) * KEY + key[None, :]
        store_scaled(cell, CHUNK * KEY, (key < KEY)[None, :], q, k, of_q[:, None], of_k[:, None], total, last[None, :])
        tl.store(scales + (chunk * HEADS + head) * KEY + key, tl.exp(last), key < KEY)
        queries, keys = products_by_channel(q, k, total, CHUNK, BLOCK, BLOCK_K, PRECISION)
        queries = tl.where(columns <= rows, queries, 0.0)
    below = keys * (beta * of_k)[:, None] * of_k[None, :]
    found = inverse_of(tl.where(columns < rows, below, 0.0), CHUNK, BLOCK, PRECISION) * beta[None, :]
    square = target * CHUNK + rows * CHUNK + columns
    tl.store(solve + square, found.to(solve.dtype.element_ty))
    products = queries * of_q[:, None] * of_k[None, :]
    tl.store(scores + square, products.to(scores.dtype.element_ty))
    if DECAYS == 1:
        factor = scales + 4 * target + at
        tl.store(factor, of_q * tl.exp(sums))
        tl.store(factor + CHUNK, of_k * tl.exp(sums))
        tl.store(factor + 2 * CHUNK, of_k * tl.exp(final - sums))
        tl.store(factor + 3 * CHUNK, tl.exp(final) + tl.zeros_like(sums))


@dependent_jit
def additive_kernel(
    taken, a, a_log, dt_bias, bounds, scores, scales, a_stride,
    KEY_HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, MIXED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, A_BETWEEN: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """`system_kernel` of additive states: scores = q k^T exp(G_i - G_j) d_j, and in scales the factors of q for
    products with S and of k for products with v, and exp(G_last). Grid (N, Hv)."""
    wait_for_inputs()
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group, place = head // SHARED, head % SHARED
    begin, end = tl.load(bounds + 2 * chunk).to(tl.int64), tl.load(bounds + 2 * chunk + 1)
    at, key = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    live = at < end - begin
    inside = live[:, None] & (key < KEY)[None, :]
    tile = ((begin + at) * KEY_HEADS + group)[:, None] * MIXED + key[None, :]
    q, k = tl.load(taken + tile, inside, 0.0), tl.load(taken + tile + KEY, inside, 0.0)
    gate = tl.load(a + (begin + at) * a_stride + group * A_BETWEEN + place, live, 0.0).to(tl.float32)
    width = tl.where(live, step_width(gate + tl.load(dt_bias + head), LOW, HIGH), 0.0)
    decay = -tl.exp(tl.load(a_log + head)) * width
    sums, final = tl.cumsum(decay, 0), tl.sum(decay, 0)  # G
    rows, columns = at[:, None], at[None, :]
    between = tl.exp(tl.where(columns <= rows, sums[:, None] - sums[None, :], float("-inf")))
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between * width[None, :]
    target = (chunk * KEY_HEADS * SHARED + head) * CHUNK
    tl.store(scores + (target + rows) * CHUNK + columns, products.to(scores.dtype.element_ty))
    factor = scales + 4 * target + at
    tl.store(factor, tl.exp(sums))
    tl.store(factor + 2 * CHUNK, width * tl.exp(final - sums))
    tl.store(factor + 3 * CHUNK, tl.exp(final) + tl.zeros_like(sums))


@triton.jit
def states_kernel(
    taken, memory, out, bounds, firsts, solve, scores, scales, scaled, skip, rows, reads,
    KEY_HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, MIXED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, DECAYS: tl.constexpr,
    ADDITIVE: tl.constexpr,
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
        v = tl.load(mixed + 2 * KEY + place * VALUE + column[None, :], wide, 0.0).to(tl.float32)
        before = state.to(kind)
        if DECAYS == 1:
            q = tl.load(mixed + key[None, :], inside, 0.0)
            k = tl.load(mixed + KEY + key[None, :], inside, 0.0)
            factor = scales + 4 * target + at
            if not ADDITIVE:
                known = tl.dot(k, before, input_precision=PRECISION) * tl.load(factor + CHUNK)[:, None]
            result = tl.dot(q, before, input_precision=PRECISION) * tl.load(factor)[:, None]
        else:
            place_scaled, whole = scaled + (3 * target + at[:, None]) * KEY + key[None, :], (key < KEY)[None, :]
            k = tl.load(place_scaled + CHUNK * KEY, whole, 0.0)
            known = tl.dot(k, before, input_precision=PRECISION)
            result = tl.dot(tl.load(place_scaled, whole, 0.0), before, input_precision=PRECISION)
        if ADDITIVE:
            change = v
        else:
            inverse = tl.load(solve + target * CHUNK + square)
            change = tl.dot(inverse, (v - known).to(kind), input_precision=PRECISION)
        products = tl.load(scores + target * CHUNK + square)
        result += tl.dot(products, change.to(kind), input_precision=PRECISION)
        if skip is not None:
            result += tl.load(skip + head) * v
        place_out = ((begin + at) * HEADS + head)[:, None] * VALUE + column[None, :]
        tl.store(out + place_out, result.to(out.dtype.element_ty), wide)
        if DECAYS == 1:
            left = (change * tl.load(factor + 2 * CHUNK)[:, None]).to(kind)
            state *= tl.load(scales + 4 * target + 3 * CHUNK)
        else:
            left, k = change.to(kind), tl.load(place_scaled + 2 * CHUNK * KEY, whole, 0.0)
            kept = scales + (tl.cast(chunk, tl.int64) * HEADS + head) * KEY + key
            state *= tl.load(kept, key < KEY, 0.0)[:, None]
        state += tl.dot(tl.trans(k), left, input_precision=PRECISION)
        row = tl.load(rows + end - 1)
        if row >= 0:
            tl.store(memory + (row * HEADS + head) * (KEY * VALUE) + cell, state, held)


def run_chunks(
    taken: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights, memory: Tensor, runs: StateRuns, shape: DeltaShape,
    out: Tensor, shortest: int,
) -> None:  # fmt: skip
    """The delta rule of runs of at least `shortest` tokens. taken [T, Hk, C] after the convolution, b and a as in
    `DeltaInputs`, out [T, Hv, Dv]; stores states in memory."""
    size = _chunk(shape, taken.dtype)
    chunks = runs.chunks(shortest, size)
    if not chunks.num:
        return
    heads = shape.value_heads
    found = taken.new_empty(1 if shape.additive else 2, chunks.num, heads, size, size)
    solve, scores = found[0], found[-1]
    by_channel = shape.decays > 1
    scales = memory.new_empty(chunks.num, heads, shape.key if by_channel else 4 * size)
    scaled = taken.new_empty(chunks.num, heads, 3, size, shape.key) if by_channel else solve
    if shape.additive:
        additive_kernel[(chunks.num, heads)](
            taken, a, weights.a_log, weights.dt_bias, chunks.bounds, scores, scales, stride_of(a, 0),
            **_scores_constants(shape, taken.dtype, a.stride(1)), num_warps=4, num_stages=1,
        )  # fmt: skip
    else:
        system_kernel[(chunks.num, heads)](
            taken, b, a, weights.a_log, weights.dt_bias, chunks.bounds, solve, scores, scales, scaled, stride_of(b, 0),
            stride_of(a, 0), **_system_constants(shape, taken.dtype, b.stride(1), a.stride(1)), num_warps=8,
            num_stages=1,
        )  # fmt: skip
    states = _states_constants(shape, taken.dtype)
    states_kernel[(len(runs.lens), heads, triton.cdiv(shape.value, states["BLOCK_V"]))](
        taken, memory, out, chunks.bounds, chunks.firsts, solve, scores, scales, scaled, weights.skip,
        runs.rows, runs.reads,
        **states, num_warps=4, num_stages=1,
    )  # fmt: skip


def _chunk(shape: DeltaShape, dtype: torch.dtype) -> int:
    return CHUNKS.get(dtype, 64 if shape.decays == 1 else 32)


def _precision(dtype: torch.dtype) -> str:
    """Precision of products of float32 values: near float32, or no worse than the activations."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def decay_constants(shape: DeltaShape, b_between: int, a_between: int) -> dict[str, Any]:
    return {
        "DECAYS": shape.decays, "BLOCK_W": 1 if shape.decays == 1 else max(16, next_power_of_2(shape.decays)),
        "BOUND": shape.bound, "B_BETWEEN": b_between, "A_BETWEEN": a_between,
    }  # fmt: skip


def _chunk_constants(shape: DeltaShape, dtype: torch.dtype) -> dict[str, Any]:
    """Constants of all kernels of this file."""
    return {
        "KEY_HEADS": shape.key_heads, "SHARED": shape.shared, "KEY": shape.key, "MIXED": shape.mixed,
        "CHUNK": _chunk(shape, dtype), "BLOCK_K": max(16, next_power_of_2(shape.key)), "PRECISION": _precision(dtype),
    }  # fmt: skip


def _system_constants(shape: DeltaShape, dtype: torch.dtype, b_between: int, a_between: int) -> dict[str, Any]:
    decays = decay_constants(shape, b_between, a_between)
    return {**_chunk_constants(shape, dtype), "EPS": LENGTH_EPS, "BLOCK": _BLOCK, **decays}


def _scores_constants(shape: DeltaShape, dtype: torch.dtype, a_between: int) -> dict[str, Any]:
    steps = {"A_BETWEEN": a_between, "LOW": shape.shortest, "HIGH": shape.longest}
    return {**_chunk_constants(shape, dtype), **steps}


def _states_constants(shape: DeltaShape, dtype: torch.dtype) -> dict[str, Any]:
    return {
        **_chunk_constants(shape, dtype), "VALUE": shape.value,
        "BLOCK_V": min(_COLUMNS, max(16, next_power_of_2(shape.value))), "DECAYS": shape.decays,
        "ADDITIVE": shape.additive,
    }  # fmt: skip


def chunk_cases(name: str, shape: DeltaShape, dtype: torch.dtype, b_between: int, a_between: int) -> list[AotCase]:
    """The specializations that `run_chunks` launches."""
    kind = f"*{element(dtype)}"
    table = {"bounds": "*i32", "solve": kind, "scores": kind, "scales": "*fp32", "scaled": kind}
    system = {"taken": kind, "b": kind, "a": kind, "a_log": "*fp32", "dt_bias": "*fp32", **table}
    system |= {"b_stride": "i32:16", "a_stride": "i32:16"}
    states = {"taken": kind, "memory": "*fp32", "out": kind, **table, "firsts": "*i32", "rows": "*i64", "reads": "*i64"}
    solved = _system_constants(shape, dtype, b_between, a_between)
    found = _states_constants(shape, dtype) | ({} if shape.skips else {"skip": None})
    states |= {"skip": "*fp32"} if shape.skips else {}
    first = AotCase(f"delta_system_{name}", system_kernel, system, solved, 8, 1, True)
    if shape.additive:
        named = ("taken", "a", "a_log", "dt_bias", "bounds", "scores", "scales", "a_stride")
        own = {argument: system[argument] for argument in named}
        constants = _scores_constants(shape, dtype, a_between)
        first = AotCase(f"delta_additive_{name}", additive_kernel, own, constants, 4, 1, True)
    return [first, AotCase(f"delta_states_{name}", states_kernel, states, found, 4, 1, True)]
