"""Products of n-gram rows in Triton (`ngram_products`): ids of n-grams, gated products and their norms, and their sum
with the streams, a launch each; two for the sum in steps with long runs.

Legend: as in `ngram_products`; W = n D channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.delta.protocol import StateRuns
from moe_engine.kernels.ops.ngram_products import NgramProducts
from moe_engine.kernels.ops.ngram_rows import LEAST
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import element, row_stride, warps_for, with_contiguous_rows

_LEAST = tl.constexpr(LEAST)
_TOKENS = 128
"""Tokens of an iteration of a program that finds ids."""
_CHANNELS = 512
"""Channels of a program of the convolution."""
SHORT = 16
"""Longest run whose tokens a program takes one after another."""


@dependent_jit(do_not_specialize=["end"], do_not_specialize_on_alignment=["tokens", "rows", "starts", "reads"])
def text_ids_kernel(
    tokens, kept, rows, starts, reads, out, end, LAST: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """out [T, LAST + 1] and the stored states, see `NgramIds`. The ids that the run's state keeps are in registers
    before a state is stored. Grid (R,)."""
    wait_for_inputs()
    run = tl.program_id(0)
    begin, behind, read = tl.load(starts + run), tl.load(starts + run + 1), tl.load(reads + run)
    back, line = tl.arange(0, SIDE), tl.arange(0, SIDE)
    before = tl.load(kept + read * LAST + line, line < LAST, 0.0)
    tl.debug_barrier()
    for first in range(begin, behind, BLOCK):
        token = first + tl.arange(0, BLOCK)
        live = token < behind
        place = (token - begin)[:, None] - back[None, :]
        near = live[:, None] & (place >= 0)
        new = tl.load(tokens + (token[:, None] - back[None, :]), near, -1).to(tl.float32) + 1.0
        here = (place + LAST)[:, :, None] == line[None, None, :]
        old = tl.sum(tl.where(here, before[None, None, :], 0.0), 2)
        value = tl.where(near, new, old)
        ended = ((value == 0.0) | (value == end + 1.0)) & (back > 0)[None, :]
        found = tl.where(tl.cumsum(ended.to(tl.int32), 1) > 0, end, value.to(tl.int32) - 1)
        inside = live[:, None] & (back <= LAST)[None, :]
        tl.store(out + token[:, None].to(tl.int64) * (LAST + 1) + back[None, :], found, inside)
        row = tl.load(rows + token, live, -1)
        stored = (row >= 0)[:, None] & (back < LAST)[None, :]
        tl.store(kept + row[:, None] * LAST + (LAST - 1 - back)[None, :], value, stored)


@dependent_jit(do_not_specialize_on_alignment=["streams_stride"])
def gate_values_kernel(
    streams, found, weights, norm, gated, normed, streams_stride, found_stride, eps, scale,
    STREAMS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `GateValues`. Grid (T, STREAMS)."""
    wait_for_inputs()
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind: tl.constexpr = gated.dtype.element_ty
    channel = tl.arange(0, BLOCK)
    live, own = channel < WIDTH, stream * WIDTH + channel
    line = found + token * found_stride
    x = tl.load(streams + token * streams_stride + own, live, 0.0).to(tl.float32)
    key = tl.load(line + own, live, 0.0).to(tl.float32)
    dot = tl.sum(x * tl.load(weights + own, live, 0.0) * key, 0)
    dot *= tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * tl.rsqrt(tl.sum(key * key, 0) / WIDTH + eps) * scale
    root = tl.sqrt(tl.maximum(tl.abs(dot), _LEAST))
    gate = 1.0 / (1.0 + tl.exp(tl.where(dot < 0.0, root, -root)))
    value = (gate * tl.load(line + STREAMS * WIDTH + channel, live, 0.0).to(tl.float32)).to(kind)
    at = token * (STREAMS * WIDTH) + own
    tl.store(gated + at, value, live)
    wide = value.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps) * tl.load(norm + own, live, 0.0)
    tl.store(normed + at, scaled.to(kind), live)


@triton.jit
def _before(normed, kept, channel, live, token, begin, read, back, LINES: tl.constexpr, WIDE: tl.constexpr):
    """The normed products `back` tokens before one of a run that begins at token `begin`."""
    at = token - back
    here = live & (channel * 0 + at >= begin)
    new = tl.load(normed + at * WIDE + channel, here, 0.0)
    old = tl.load(kept + (read * LINES + LINES + at - begin) * WIDE + channel, live & ~here, 0.0)
    return tl.where(here, new, old.to(new.dtype))


@triton.jit
def _mix(
    gated, normed, kept, taps, residual, channel, token, begin, read, residual_stride,
    WIDE: tl.constexpr, TAPS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Channels of one token."""
    live = channel < WIDE
    LINES: tl.constexpr = (TAPS - 1) * APART
    kind: tl.constexpr = residual.dtype.element_ty
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        back = (TAPS - 1 - tap) * APART
        value = _before(normed, kept, channel, live, token, begin, read, back, LINES, WIDE).to(tl.float32)
        total += value * tl.load(taps + tap * WIDE + channel, live, 0.0)
    total = total.to(kind).to(tl.float32)
    mixed = (total / (1.0 + tl.exp(-total))).to(kind).to(tl.float32)
    place = residual + token * residual_stride + channel
    summed = tl.load(place, live, 0.0).to(tl.float32) + tl.load(gated + token * WIDE + channel, live, 0.0).to(
        tl.float32
    )
    tl.store(place, (summed.to(kind).to(tl.float32) + mixed).to(kind), live)


@triton.jit
def _keep(normed, kept, channel, token, begin, read, target, LINES: tl.constexpr, WIDE: tl.constexpr):
    """The last products after a token, line after line: `target` may be the row that the run reads, whose line is read
    before it is overwritten, by the same thread."""
    live = channel < WIDE
    for line in range(LINES):
        value = _before(normed, kept, channel, live, token, begin, read, LINES - 1 - line, LINES, WIDE)
        tl.store(kept + (target * LINES + line) * WIDE + channel, value.to(kept.dtype.element_ty), live)


@dependent_jit
def mix_products_kernel(
    gated, normed, kept, taps, rows, starts, reads, residual, residual_stride,
    WIDE: tl.constexpr, TAPS: tl.constexpr, APART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `MixProducts`, for short runs. Grid (R, WIDE / BLOCK)."""
    wait_for_inputs()
    run, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, read = tl.load(starts + run).to(tl.int64), tl.load(reads + run)
    end = tl.load(starts + run + 1)
    for token in range(begin, end):
        _mix(gated, normed, kept, taps, residual, channel, token, begin, read, residual_stride, WIDE, TAPS, APART)
    tl.debug_barrier()  # threads overwrite below what others have read
    for token in range(begin, end):
        row = tl.load(rows + token)
        if row >= 0:
            _keep(normed, kept, channel, token, begin, read, row, (TAPS - 1) * APART, WIDE)


@triton.jit
def mix_long_kernel(
    gated, normed, kept, taps, run_of, starts, reads, residual, residual_stride,
    WIDE: tl.constexpr, TAPS: tl.constexpr, APART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `MixProducts`, without the states. Grid (T, WIDE / BLOCK)."""
    token, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    run = tl.load(run_of + token)
    begin, read = tl.load(starts + run).to(tl.int64), tl.load(reads + run)
    _mix(gated, normed, kept, taps, residual, channel, token, begin, read, residual_stride, WIDE, TAPS, APART)


@triton.jit
def keep_products_kernel(
    normed, kept, stored, stored_starts, rows, starts, reads,
    WIDE: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last products after each stored token of a run, in order: the row that a run reads is stored last.
    Grid (R, WIDE / BLOCK)."""
    run, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, read = tl.load(starts + run).to(tl.int64), tl.load(reads + run)
    for index in range(tl.load(stored_starts + run), tl.load(stored_starts + run + 1)):
        token = tl.load(stored + index).to(tl.int64)
        _keep(normed, kept, channel, token, begin, read, tl.load(rows + token), LINES, WIDE)


def ids(tokens: Tensor, kept: Tensor, runs: StateRuns, end: int) -> Tensor:
    """`NgramIds` in one launch."""
    last = kept.shape[1]
    out = torch.empty((len(tokens), last + 1), dtype=torch.int32, device=tokens.device)
    if len(tokens):
        block = min(_TOKENS, next_power_of_2(runs.longest))
        text_ids_kernel[(len(runs.lens),)](
            tokens, kept, runs.rows, runs.starts, runs.reads, out, end, LAST=last, SIDE=next_power_of_2(last + 1),
            BLOCK=block, num_warps=4 if block == _TOKENS else 1,
        )  # fmt: skip
    return out


def gate(streams: Tensor, found: Tensor, weights: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`GateValues` in one launch."""
    (n, width), found = weights.shape, with_contiguous_rows(found)
    gated, normed = (streams.new_empty(len(streams), n * width) for _ in range(2))
    if len(streams):
        block = next_power_of_2(width)
        gate_values_kernel[(len(streams), n)](
            streams, found, weights, norm, gated, normed, row_stride(streams), row_stride(found), eps, width**-0.5,
            STREAMS=n, WIDTH=width, BLOCK=block, num_warps=warps_for(block),
        )  # fmt: skip
    return gated, normed


def mix(
    gated: Tensor, normed: Tensor, kept: Tensor, taps: Tensor, runs: StateRuns, residual: Tensor, apart: int
) -> None:
    """`MixProducts` in one launch, or in two."""
    count, wide = len(taps), gated.shape[1]
    if not len(gated):
        return
    block = min(_CHANNELS, next_power_of_2(wide))
    blocks, warps = triton.cdiv(wide, block), warps_for(block)
    sizes: dict[str, Any] = {"WIDE": wide, "TAPS": count, "APART": apart, "BLOCK": block}
    stride = row_stride(residual)
    if runs.longest <= SHORT:
        mix_products_kernel[(len(runs.lens), blocks)](
            gated, normed, kept, taps, runs.rows, runs.starts, runs.reads, residual, stride, **sizes, num_warps=warps
        )
        return
    mix_long_kernel[(len(gated), blocks)](
        gated, normed, kept, taps, runs.run_of, runs.starts, runs.reads, residual, stride, **sizes, num_warps=warps
    )
    keep_products_kernel[(len(runs.lens), blocks)](
        normed, kept, *runs.stored_tokens, runs.rows, runs.starts, runs.reads, WIDE=wide, LINES=(count - 1) * apart,
        BLOCK=block, num_warps=warps,
    )  # fmt: skip


TRITON = NgramProducts(ids, gate, mix)


def aot_cases() -> list[AotCase]:
    """Qwen3.8-Flash-Next with the widths of transformers' defaults: n-grams of three tokens, four streams of 2,048
    channels, four taps."""
    streams, width, apart, taps = 4, 2048, 3, 4
    runs = {"rows": "*i64", "starts": "*i32", "reads": "*i64"}
    cases = []
    for block, warps in ((1, 1), (_TOKENS, 4)):
        signature = {"tokens": "*i64:1", "kept": "*fp32", "rows": "*i64:1", "starts": "*i32:1", "reads": "*i64:1"}
        signature |= {"out": "*i32", "end": "i32"}
        sizes: dict[str, Any] = {"LAST": apart - 1, "SIDE": 4, "BLOCK": block}
        cases.append(AotCase(f"ids of texts, {block}", text_ids_kernel, signature, sizes, warps, 3, False))
    for dtype in (torch.bfloat16, torch.float32):
        name, kind = element(dtype), f"*{element(dtype)}"
        signature = dict.fromkeys(("streams", "found", "gated", "normed"), kind) | {"weights": "*fp32", "norm": "*fp32"}
        signature |= {"streams_stride": "i32", "found_stride": "i32:16", "eps": "fp32", "scale": "fp32"}
        sizes = {"STREAMS": streams, "WIDTH": width, "BLOCK": width}
        cases.append(AotCase(f"gated values, {name}", gate_values_kernel, signature, sizes, warps_for(width), 3, False))
        sizes = {"WIDE": streams * width, "TAPS": taps, "APART": apart, "BLOCK": _CHANNELS}
        signature = dict.fromkeys(("gated", "normed", "kept"), kind) | {"taps": "*fp32"} | runs
        signature |= {"residual": kind, "residual_stride": "i32"}
        warps = warps_for(_CHANNELS)
        cases.append(AotCase(f"mixed products, {name}", mix_products_kernel, signature, sizes, warps, 3, False))
        long = {("run_of" if key == "rows" else key): value for key, value in signature.items()} | {"run_of": "*i32"}
        cases.append(AotCase(f"mixed products of prompts, {name}", mix_long_kernel, long, sizes, warps, 3, False))
        signature = {"normed": kind, "kept": kind, "stored": "*i32", "stored_starts": "*i32"} | runs
        sizes = {"WIDE": streams * width, "LINES": (taps - 1) * apart, "BLOCK": _CHANNELS}
        cases.append(AotCase(f"kept products, {name}", keep_products_kernel, signature, sizes, warps, 3, False))
    return cases
