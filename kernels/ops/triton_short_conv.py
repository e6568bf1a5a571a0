"""Convolutions between two gates in Triton (`short_conv`): a launch for steps of short runs, two for others.

Legend: as in `short_conv`; LINES = K - 1 products that a state keeps.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.delta.protocol import StateRuns
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import element, row_stride, warps_for, with_contiguous_rows

_CHANNELS = 256
"""Channels of a program."""
SHORT = 16
"""Longest run whose tokens a program takes one after another."""


@triton.jit
def _product(projected, kept, channel, live, at, begin, read, stride, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """First gate times value of token `at`, which a state keeps if it is before the run's first token `begin`."""
    here = live & (channel * 0 + at >= begin)
    gate = tl.load(projected + at * stride + channel, here, 0.0).to(tl.float32)
    value = tl.load(projected + at * stride + 2 * WIDTH + channel, here, 0.0).to(tl.float32)
    old = tl.load(kept + (read * LINES + LINES + at - begin) * WIDTH + channel, live & ~here, 0.0)
    return tl.where(here, (gate * value).to(kept.dtype.element_ty), old)


@triton.jit
def _convolve(
    projected, taps, kept, out, channel, token, begin, read, stride, WIDTH: tl.constexpr, TAPS: tl.constexpr
):  # fmt: skip
    """Channels of one token."""
    live = channel < WIDTH
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        at = token - (TAPS - 1) + tap
        value = _product(projected, kept, channel, live, at, begin, read, stride, TAPS - 1, WIDTH)
        total += value.to(tl.float32) * tl.load(taps + tap * WIDTH + channel, live, 0.0)
    gate = tl.load(projected + token * stride + WIDTH + channel, live, 0.0).to(tl.float32)
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(out + token * WIDTH + channel, (gate * total.to(kind).to(tl.float32)).to(kind), live)


@triton.jit
def _keep(
    projected, kept, channel, token, begin, read, target, stride, LINES: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The last products after a token, line after line: `target` may be the row that the run reads, whose line is read
    before it is overwritten, by the same thread."""
    live = channel < WIDTH
    for line in tl.static_range(LINES):
        at = token - (LINES - 1) + line
        value = _product(projected, kept, channel, live, at, begin, read, stride, LINES, WIDTH)
        tl.store(kept + (target * LINES + line) * WIDTH + channel, value, live)


@dependent_jit
def short_conv_kernel(
    projected, taps, kept, out, rows, starts, reads, stride,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `GatedConv`, for short runs. Grid (R, WIDTH / BLOCK)."""
    wait_for_inputs()
    run, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, read = tl.load(starts + run).to(tl.int64), tl.load(reads + run)
    end = tl.load(starts + run + 1)
    for token in range(begin, end):
        _convolve(projected, taps, kept, out, channel, token, begin, read, stride, WIDTH, TAPS)
    tl.debug_barrier()  # threads overwrite below what others have read
    for token in range(begin, end):
        row = tl.load(rows + token)
        if row >= 0:
            _keep(projected, kept, channel, token, begin, read, row, stride, TAPS - 1, WIDTH)


@triton.jit
def long_conv_kernel(
    projected, taps, kept, out, run_of, starts, reads, stride,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `GatedConv`, without the states. Grid (T, WIDTH / BLOCK)."""
    token, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    run = tl.load(run_of + token)
    begin, read = tl.load(starts + run).to(tl.int64), tl.load(reads + run)
    _convolve(projected, taps, kept, out, channel, token, begin, read, stride, WIDTH, TAPS)


@triton.jit
def conv_states_kernel(
    projected, kept, stored, stored_starts, rows, starts, reads, stride,
    WIDTH: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last products after each stored token of a run, in order: the row that a run reads is stored last.
    Grid (R, WIDTH / BLOCK)."""
    run, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, read = tl.load(starts + run).to(tl.int64), tl.load(reads + run)
    for index in range(tl.load(stored_starts + run), tl.load(stored_starts + run + 1)):
        token = tl.load(stored + index).to(tl.int64)
        _keep(projected, kept, channel, token, begin, read, tl.load(rows + token), stride, LINES, WIDTH)


def gated_conv(projected: Tensor, taps: Tensor, kept: Tensor, runs: StateRuns) -> Tensor:
    """`GatedConv` in one launch, or in two."""
    (count, width), projected = taps.shape, with_contiguous_rows(projected)
    out = projected.new_empty(len(projected), width)
    if not len(projected):
        return out
    block, stride = min(_CHANNELS, next_power_of_2(width)), row_stride(projected)
    blocks, warps = triton.cdiv(width, block), warps_for(block)
    sizes: dict[str, Any] = {"WIDTH": width, "TAPS": count, "BLOCK": block, "num_warps": warps}
    if runs.longest <= SHORT:
        short_conv_kernel[(len(runs.lens), blocks)](
            projected, taps, kept, out, runs.rows, runs.starts, runs.reads, stride, **sizes
        )
        return out
    long_conv_kernel[(len(projected), blocks)](
        projected, taps, kept, out, runs.run_of, runs.starts, runs.reads, stride, **sizes
    )
    conv_states_kernel[(len(runs.lens), blocks)](
        projected, kept, *runs.stored_tokens, runs.rows, runs.starts, runs.reads, stride, WIDTH=width, LINES=count - 1,
        BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out


def aot_cases() -> list[AotCase]:
    """LFM2-8B-A1B: 2,048 channels, three taps."""
    width, taps, warps = 2048, 3, warps_for(_CHANNELS)
    cases = []
    for dtype in (torch.bfloat16, torch.float32):
        name, kind = element(dtype), f"*{element(dtype)}"
        places = {"starts": "*i32", "reads": "*i64", "stride": "i32:16"}
        short = {"projected": kind, "taps": "*fp32", "kept": kind, "out": kind, "rows": "*i64"} | places
        sizes: dict[str, Any] = {"WIDTH": width, "TAPS": taps, "BLOCK": _CHANNELS}
        cases.append(AotCase(f"gated convolutions, {name}", short_conv_kernel, short, sizes, warps, 3, False))
        long = {("run_of" if key == "rows" else key): value for key, value in short.items()} | {"run_of": "*i32"}
        cases.append(AotCase(f"gated convolutions of prompts, {name}", long_conv_kernel, long, sizes, warps, 3, False))
        states = {"projected": kind, "kept": kind, "stored": "*i32", "stored_starts": "*i32", "rows": "*i64"} | places
        sizes = {"WIDTH": width, "LINES": taps - 1, "BLOCK": _CHANNELS}
        cases.append(AotCase(f"states of convolutions, {name}", conv_states_kernel, states, sizes, warps, 3, False))
    return cases
