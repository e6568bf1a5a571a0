"""The gated delta net, and additive states, on a GPU: convolution with the last inputs, delta rule, gated norm.

Runs of up to `SHORT` tokens (decodes, verifications) take a launch each: the programs of the delta rule keep a block of
a state's columns in registers, token after token. Longer runs take chunks (`triton_chunks`), and their last inputs are
stored by a launch of its own.

Legend: as in `protocol`; S stored states of a step, BV columns of a value head of one program. BETWEEN: stride of the
key heads of an input.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.delta.protocol import DeltaInputs, DeltaShape, DeltaStates, DeltaWeights, StateRuns
from moe_engine.kernels.delta.reference import LENGTH_EPS
from moe_engine.kernels.delta.triton_chunks import chunk_cases, decay_constants, log_decay, run_chunks, step_width
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import element, stride_of, warps_for, with_contiguous_rows

NEMOTRON_3 = DeltaShape(8, 64, 128, 64, 4, additive=True)
"""Nemotron-3-Nano on one GPU."""
MINIMAX_TEXT = DeltaShape(8, 8, 128, 128, 0, additive=True, shortest=1.0, longest=1.0)
"""Lightning attention of MiniMax-Text-01 on eight GPUs."""
SHORT = 16
"""Longest run whose tokens the delta rule takes one after another."""
_CHANNELS, _COLUMNS = 256, 32
"""Channels of a program of the convolution; columns of a value head of a program of the delta rule."""


@triton.jit
def _convolve(
    inputs, taken, tail, conv, bias, head, channel, token, begin, read, stride,
    HEADS: tl.constexpr, MIXED: tl.constexpr, BETWEEN: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Channels of one token of a run that begins at token `begin`."""
    live = channel < MIXED
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        at = token - (TAPS - 1) + tap
        here = live & (channel * 0 + at >= begin)
        new = tl.load(inputs + at * stride + head * BETWEEN + channel, here, 0.0).to(tl.float32)
        place = (read * HEADS + head) * (TAPS - 1) + (TAPS - 1 + at - begin)
        old = tl.load(tail + place * MIXED + channel, live & ~here, 0.0).to(tl.float32)
        total += (new + old) * tl.load(conv + (head * TAPS + tap) * MIXED + channel, live, 0.0)
    if bias is not None:
        total += tl.load(bias + head * MIXED + channel, live, 0.0)
    out = total / (1.0 + tl.exp(-total))
    tl.store(taken + (token * HEADS + head) * MIXED + channel, out.to(taken.dtype.element_ty), live)


@triton.jit
def conv_kernel(
    inputs, taken, tail, conv, bias, run_of, starts, reads, stride,
    HEADS: tl.constexpr, MIXED: tl.constexpr, BETWEEN: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """taken [T, HEADS, MIXED] = silu(convolution of the run's inputs after its tail). Grid (T, HEADS, MIXED/BLOCK)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    run = tl.load(run_of + token)
    begin, read = tl.load(starts + run).to(tl.int64), tl.load(reads + run)
    _convolve(inputs, taken, tail, conv, bias, head, channel, token, begin, read, stride, HEADS, MIXED, BETWEEN, TAPS)


@triton.jit
def _store_tail(
    inputs, tail, head, channel, token, begin, read, target, stride,
    HEADS: tl.constexpr, MIXED: tl.constexpr, BETWEEN: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """The last inputs after a token, line after line: `target` may be the row that the run reads, whose line is read
    before it is overwritten, by the same thread."""
    live = channel < MIXED
    for line in tl.static_range(TAPS - 1):
        at = token - (TAPS - 2) + line
        here = live & (channel * 0 + at >= begin)
        new = tl.load(inputs + at * stride + head * BETWEEN + channel, here, 0.0)
        place = (read * HEADS + head) * (TAPS - 1) + (TAPS - 1 + at - begin)
        old = tl.load(tail + place * MIXED + channel, live & ~here, 0.0)
        line_out = (target * HEADS + head) * (TAPS - 1) + line
        tl.store(tail + line_out * MIXED + channel, tl.where(here, new, old), live)


@triton.jit
def tail_kernel(
    inputs, tail, stored, stored_starts, rows, starts, reads, stride,
    HEADS: tl.constexpr, MIXED: tl.constexpr, BETWEEN: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last inputs after each stored token of a run, in order: the row that a run reads is stored last.
    Grid (R, HEADS, MIXED / BLOCK)."""
    run, head = tl.program_id(0), tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    begin, read = tl.load(starts + run).to(tl.int64), tl.load(reads + run)
    for index in range(tl.load(stored_starts + run), tl.load(stored_starts + run + 1)):
        token = tl.load(stored + index).to(tl.int64)
        _store_tail(
            inputs, tail, head, channel, token, begin, read, tl.load(rows + token), stride, HEADS, MIXED, BETWEEN, TAPS
        )


@dependent_jit
def conv_update_kernel(
    inputs, taken, tail, conv, bias, rows, starts, reads, stride,
    HEADS: tl.constexpr, MIXED: tl.constexpr, BETWEEN: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`conv_kernel` and `tail_kernel` in one launch, for short runs. Grid (R, HEADS, MIXED / BLOCK)."""
    wait_for_inputs()
    run, head = tl.program_id(0), tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    begin, read = tl.load(starts + run).to(tl.int64), tl.load(reads + run)
    end = tl.load(starts + run + 1)
    for token in range(begin, end):
        _convolve(
            inputs, taken, tail, conv, bias, head, channel, token, begin, read, stride, HEADS, MIXED, BETWEEN, TAPS
        )
    for token in range(begin, end):
        row = tl.load(rows + token)
        if row >= 0:
            _store_tail(inputs, tail, head, channel, token, begin, read, row, stride, HEADS, MIXED, BETWEEN, TAPS)


@dependent_jit
def delta_kernel(
    taken, b, a, memory, out, a_log, dt_bias, skip, rows, starts, reads, b_stride, a_stride,
    KEY_HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, MIXED: tl.constexpr,
    LONGEST: tl.constexpr, EPS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    DECAYS: tl.constexpr, BLOCK_W: tl.constexpr, BOUND: tl.constexpr,
    B_BETWEEN: tl.constexpr, A_BETWEEN: tl.constexpr, ADDITIVE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """out [T, Hv, VALUE] and the stored states of runs of at most LONGEST tokens. Grid (R, Hv, VALUE / BLOCK_V).
    ADDITIVE: states without the delta rule, whose step widths are within LOW and HIGH."""
    wait_for_inputs()
    run, head = tl.program_id(0), tl.program_id(1)
    begin, end, read = tl.load(starts + run), tl.load(starts + run + 1), tl.load(reads + run)
    if end - begin > LONGEST:
        return
    HEADS: tl.constexpr = KEY_HEADS * SHARED
    group, place = head // SHARED, head % SHARED
    key = tl.arange(0, BLOCK_K)
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (key < KEY)[:, None] & (column < VALUE)[None, :]
    tile = key[:, None] * VALUE + column[None, :]
    state = tl.load(memory + (read * HEADS + head) * (KEY * VALUE) + tile, inside, 0.0)
    channel = tl.arange(0, BLOCK_W)
    rate = tl.exp(tl.load(a_log + head))
    bias = tl.load(dt_bias + head * DECAYS + channel, channel < DECAYS, 0.0)
    for step in range(0, end - begin):
        token = begin.to(tl.int64) + step
        mixed = taken + (token * KEY_HEADS + group) * MIXED
        q = tl.load(mixed + key, key < KEY, 0.0).to(tl.float32)
        k = tl.load(mixed + KEY + key, key < KEY, 0.0).to(tl.float32)
        v = tl.load(mixed + 2 * KEY + place * VALUE + column, column < VALUE, 0.0).to(tl.float32)
        at = a + token * a_stride + group * A_BETWEEN + place * DECAYS + channel
        gate = tl.load(at, channel < DECAYS, 0.0).to(tl.float32) + bias
        if ADDITIVE:
            width = step_width(gate, LOW, HIGH)
            state *= tl.exp(-rate * width)[:, None]
            change = v * tl.sum(width)
        else:
            q *= tl.rsqrt(tl.sum(q * q) + EPS) * tl.rsqrt(tl.full((), KEY, tl.float32))
            k *= tl.rsqrt(tl.sum(k * k) + EPS)
            beta = 1.0 / (1.0 + tl.exp(-tl.load(b + token * b_stride + group * B_BETWEEN + place).to(tl.float32)))
            beta = beta.to(b.dtype.element_ty).to(tl.float32)  # models are trained with this rounding
            state *= tl.exp(log_decay(gate, rate, BOUND))[:, None]
            change = (v - tl.sum(k[:, None] * state, 0)) * beta
        state += k[:, None] * change[None, :]
        result = tl.sum(q[:, None] * state, 0)
        if skip is not None:
            result += tl.load(skip + head) * v
        target = out + (token * HEADS + head) * VALUE + column
        tl.store(target, result.to(out.dtype.element_ty), column < VALUE)
        row = tl.load(rows + token)
        if row >= 0:
            tl.store(memory + (row * HEADS + head) * (KEY * VALUE) + tile, state, inside)


@dependent_jit
def gated_norm_kernel(
    x, z, weight, stride, eps,
    KEY_HEADS: tl.constexpr, SHARED: tl.constexpr, VALUE: tl.constexpr, BETWEEN: tl.constexpr, BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr,
):  # fmt: skip
    """x [T, Hv, VALUE] = weight * x / rms(x) * silu(z), or sigmoid(z), in place. Grid (T, Hv)."""
    wait_for_inputs()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group, place = head // SHARED, head % SHARED
    column = tl.arange(0, BLOCK)
    live = column < VALUE
    at = x + (token * KEY_HEADS * SHARED + head) * VALUE + column
    value = tl.load(at, live, 0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value) / VALUE + eps)
    gate = tl.load(z + token * stride + group * BETWEEN + place * VALUE + column, live, 0.0).to(tl.float32)
    opened = 1.0 / (1.0 + tl.exp(-gate))
    if not SIGMOID:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
        opened *= gate
    scaled = tl.load(weight + column, live, 0.0) * normed * opened
    tl.store(at, scaled.to(x.dtype.element_ty), live)


@dependent_jit
def group_norm_kernel(
    x, z, weight, stride, eps,
    KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, BETWEEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [T, KEY_HEADS, WIDTH] = weight * y / rms(y) with y = x * silu(z), in place. Grid (T, KEY_HEADS)."""
    wait_for_inputs()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    live = column < WIDTH
    at = x + (token * KEY_HEADS + head) * WIDTH + column
    gate = tl.load(z + token * stride + head * BETWEEN + column, live, 0.0).to(tl.float32)
    value = tl.load(at, live, 0.0).to(tl.float32) * gate / (1.0 + tl.exp(-gate))
    normed = value * tl.rsqrt(tl.sum(value * value) / WIDTH + eps)
    tl.store(at, (normed * tl.load(weight + head * WIDTH + column, live, 0.0)).to(x.dtype.element_ty), live)


class TritonDelta:
    """`DeltaKernel`."""

    name = "triton"

    def run(
        self, inputs: DeltaInputs, weights: DeltaWeights, states: DeltaStates, runs: StateRuns, shape: DeltaShape
    ) -> Tensor:
        inputs = DeltaInputs(*(with_contiguous_rows(x) for x in inputs))
        mixed, z, b, a = inputs
        num, between = runs.num_tokens, _between(inputs)
        taken = mixed.new_empty(num, shape.key_heads, shape.mixed)
        out = mixed.new_empty(num, shape.value_heads, shape.value)
        if not num:
            return out.flatten(1)
        if shape.taps:
            _convolved(mixed, taken, weights, states, runs, shape, between)
        else:
            taken.copy_(mixed)
        rule = _rule_constants(shape, between)
        if runs.shortest <= SHORT:
            delta_kernel[(len(runs.lens), shape.value_heads, triton.cdiv(shape.value, rule["BLOCK_V"]))](
                taken, b, a, states.memory, out, weights.a_log, weights.dt_bias, weights.skip, runs.rows, runs.starts,
                runs.reads, stride_of(b, 0), stride_of(a, 0), **rule, num_warps=4,
            )  # fmt: skip
        if runs.longest > SHORT:
            run_chunks(taken, b, a, weights, states.memory, runs, shape, out, SHORT + 1)
        if not shape.taps:
            return out.flatten(1)
        normed = (out, z, weights.norm, stride_of(z, 0), weights.eps)
        if shape.additive:
            group_norm_kernel[(num, shape.key_heads)](
                *normed, **_group_constants(shape, between), num_warps=_group_warps(shape)
            )
        else:
            gated_norm_kernel[(num, shape.value_heads)](*normed, **_norm_constants(shape, between), num_warps=1)
        return out.flatten(1)


def _convolved(
    mixed: Tensor, taken: Tensor, weights: DeltaWeights, states: DeltaStates, runs: StateRuns, shape: DeltaShape,
    between: Between,
) -> None:  # fmt: skip
    """taken = the convolution of mixed after the last inputs; stores the last inputs."""
    blocks, stride = triton.cdiv(shape.mixed, _CHANNELS), stride_of(mixed, 0)
    convolved = (mixed, taken, states.tail, weights.conv, weights.conv_bias)
    constants = _conv_constants(shape, between)
    if runs.longest <= SHORT:
        conv_update_kernel[(len(runs.lens), shape.key_heads, blocks)](
            *convolved, runs.rows, runs.starts, runs.reads, stride, **constants, num_warps=4
        )
        return
    conv_kernel[(runs.num_tokens, shape.key_heads, blocks)](
        *convolved, runs.run_of, runs.starts, runs.reads, stride, **constants, num_warps=4
    )
    tail_kernel[(len(runs.lens), shape.key_heads, blocks)](
        mixed, states.tail, *runs.stored_tokens, runs.rows, runs.starts, runs.reads, stride, **constants, num_warps=4
    )


Between = tuple[int, int, int, int]
"""Strides of the key heads of the inputs."""


def _between(inputs: DeltaInputs) -> Between:
    mixed, z, b, a = (x.stride(1) for x in inputs)
    return mixed, z, b, a


def _conv_constants(shape: DeltaShape, between: Between) -> dict[str, Any]:
    return {
        "HEADS": shape.key_heads, "MIXED": shape.mixed, "BETWEEN": between[0], "TAPS": shape.taps, "BLOCK": _CHANNELS,
    }  # fmt: skip


def _rule_constants(shape: DeltaShape, between: Between) -> dict[str, Any]:
    return {
        "KEY_HEADS": shape.key_heads, "SHARED": shape.shared, "KEY": shape.key, "VALUE": shape.value,
        "MIXED": shape.mixed, "LONGEST": SHORT, "EPS": LENGTH_EPS, "BLOCK_K": max(16, next_power_of_2(shape.key)),
        "BLOCK_V": min(_COLUMNS, max(16, next_power_of_2(shape.value))),
        **decay_constants(shape, between[2], between[3]),
        "ADDITIVE": shape.additive, "LOW": shape.shortest, "HIGH": shape.longest,
    }  # fmt: skip


def _norm_constants(shape: DeltaShape, between: Between) -> dict[str, Any]:
    return {
        "KEY_HEADS": shape.key_heads, "SHARED": shape.shared, "VALUE": shape.value, "BETWEEN": between[1],
        "BLOCK": next_power_of_2(shape.value), "SIGMOID": shape.sigmoid,
    }  # fmt: skip


def _group_constants(shape: DeltaShape, between: Between) -> dict[str, Any]:
    width = shape.normed
    return {"KEY_HEADS": shape.key_heads, "WIDTH": width, "BETWEEN": between[1], "BLOCK": next_power_of_2(width)}


def _group_warps(shape: DeltaShape) -> int:
    return warps_for(next_power_of_2(shape.normed))


def delta_cases(label: str, shape: DeltaShape, between: Between, dtype: torch.dtype = torch.bfloat16) -> list[AotCase]:
    """The specializations that a step launches."""
    kind, name = f"*{element(dtype)}", f"{label}_{element(dtype)}"
    places = {"starts": "*i32", "reads": "*i64", "stride": "i32:16"}
    inputs = {"inputs": kind, "tail": kind, **places}
    conv = {**inputs, "taken": kind, "conv": "*fp32", "run_of": "*i32"}
    # only an additive state has a bias and a skip
    biased = {"bias": "*fp32"} if shape.additive else {}
    none: dict[str, Any] = {} if shape.additive else {"bias": None}
    tail = {**inputs, "stored": "*i32", "stored_starts": "*i32", "rows": "*i64"}
    update = {**inputs, "taken": kind, "conv": "*fp32", "rows": "*i64"}
    rule = {"taken": kind, "b": kind, "a": kind, "out": kind, "rows": "*i64", "starts": "*i32", "reads": "*i64"}
    rule |= {"b_stride": "i32:16", "a_stride": "i32:16"}
    rule |= dict.fromkeys(("memory", "a_log", "dt_bias"), "*fp32")
    rule |= {"skip": "*fp32"} if shape.skips else {}
    norm = {"x": kind, "z": kind, "weight": "*fp32", "stride": "i32:16", "eps": "fp32"}
    convolved = _conv_constants(shape, between)
    ruled = _rule_constants(shape, between) | ({} if shape.skips else {"skip": None})
    rules = [
        AotCase(f"delta_rule_{name}", delta_kernel, rule, ruled, 4, 3, False),
        *(
            [] if dtype == torch.float32 else chunk_cases(name, shape, dtype, between[2], between[3])
        ),  # float32 spills; no model is served in it
    ]
    if not shape.taps:
        return rules
    last = AotCase(f"delta_norm_{name}", gated_norm_kernel, norm, _norm_constants(shape, between), 1, 3, False)
    if shape.additive:
        constants, warps = _group_constants(shape, between), _group_warps(shape)
        last = AotCase(f"delta_group_norm_{name}", group_norm_kernel, norm, constants, warps, 3, False)
    return [
        AotCase(f"delta_conv_{name}", conv_kernel, conv | biased, convolved | none, 4, 3, False),
        AotCase(f"delta_tail_{name}", tail_kernel, tail, convolved, 4, 3, False),
        AotCase(f"delta_conv_update_{name}", conv_update_kernel, update | biased, convolved | none, 4, 3, False),
        *rules,
        last,
    ]


def aot_cases() -> list[AotCase]:
    """Qwen3-Next on one GPU and on four, Kimi-Linear on one and on four, Ling and Nemotron-3-Nano on one,
    MiniMax-Text-01 on eight."""
    return [
        *delta_cases("qwen3_next", DeltaShape(16, 32, 128, 128, 4), (768, 768, 4, 4)),
        *delta_cases("qwen3_next_tp4", DeltaShape(4, 8, 128, 128, 4), (768, 768, 4, 4)),
        *delta_cases("qwen3_next", DeltaShape(16, 32, 128, 128, 4), (768, 768, 4, 4), torch.float32),
        *delta_cases("kimi_linear", DeltaShape(32, 32, 128, 128, 4, 128, sigmoid=True), (384, 128, 1, 128)),
        *delta_cases("kimi_linear_tp4", DeltaShape(8, 8, 128, 128, 4, 128, sigmoid=True), (384, 128, 1, 128)),
        *delta_cases("ling3", DeltaShape(32, 32, 128, 128, 4, 128, -5.0, True), (640, 640, 1, 640)),
        *delta_cases("nemotron3", NEMOTRON_3, (1280, 1280, 8, 8)),
        *delta_cases("minimax_text", MINIMAX_TEXT, (384, 384, 384, 384)),
    ]
