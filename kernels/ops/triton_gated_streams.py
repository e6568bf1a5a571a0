"""Residual streams with gates of low rank in Triton: a launch before, between and after the two products of a read
(`gated_streams`).

Legend: as in `gated_streams`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.ops.gated_streams import GatedStreams
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import row_stride, warps_for, with_contiguous_rows

_BLOCK = 1024
"""Most channels of a program that reads."""


@dependent_jit
def norm_gated_kernel(
    x, residual, weight, out, x_stride, residual_stride, eps,
    STREAMS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A stream of a token, with x [T, WIDTH] added by the weight after the streams, in place (None: nothing), and its
    norm in out [T, STREAMS WIDTH]. Grid (T, STREAMS)."""
    wait_for_inputs()
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, BLOCK)
    live = channel < WIDTH
    line = residual + token * residual_stride
    place = line + stream * WIDTH + channel
    value = tl.load(place, live, 0.0)
    if x is not None:
        gate = tl.load(line + STREAMS * WIDTH + stream).to(tl.float32)
        added = gate * tl.load(x + token * x_stride + channel, live, 0.0).to(tl.float32)
        value = (value.to(tl.float32) + added.to(value.dtype).to(tl.float32)).to(value.dtype)
        tl.store(place, value, live)
    wide = value.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    normed *= tl.load(weight + stream * WIDTH + channel, live, 0.0)
    tl.store(out + token * (STREAMS * WIDTH) + stream * WIDTH + channel, normed.to(value.dtype), live)


@dependent_jit
def rank_gates_kernel(
    projected, residual, out, projected_stride, residual_stride,
    STREAMS: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """out [T, RANK] = silu(projected / STREAMS); the numbers after them become the weights of the next result, after
    the streams (residual None: there are none). Grid (T)."""
    wait_for_inputs()
    token, number = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    live, row = number < RANK, projected + token * projected_stride
    value = tl.load(row + number, live, 0.0)
    scaled = value.to(tl.float32) / STREAMS
    tl.store(out + token * RANK + number, (scaled * tl.sigmoid(scaled)).to(value.dtype), live)
    if residual is not None:
        stream = tl.arange(0, NUMBERS)
        own = stream < STREAMS
        weights = 2 * tl.sigmoid(tl.load(row + RANK + stream, own, 0.0).to(tl.float32) / STREAMS)
        behind = residual + token * residual_stride + STREAMS * WIDTH + stream
        tl.store(behind, weights.to(residual.dtype.element_ty), own)


@dependent_jit
def read_gated_kernel(gates, normed, out, STREAMS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, WIDTH] = the mean of sigmoid(gates) * normed over the streams. Grid (T, blocks of WIDTH)."""
    wait_for_inputs()
    token, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for stream in tl.static_range(STREAMS):
        place = token * (STREAMS * WIDTH) + stream * WIDTH + channel
        gate = tl.load(gates + place, live, 0.0).to(tl.float32)
        total += tl.sigmoid(gate) * tl.load(normed + place, live, 0.0).to(tl.float32)
    tl.store(out + token * WIDTH + channel, (total / STREAMS).to(out.dtype.element_ty), live)


def norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`GatedStreams.norm` in one launch."""
    count, (streams, width) = len(residual), weight.shape
    out = residual.new_empty(count, streams * width)
    if not count:
        return out
    x = None if x is None else with_contiguous_rows(x)
    block = next_power_of_2(width)
    norm_gated_kernel[(count, streams)](
        x, residual, weight, out, 0 if x is None else row_stride(x), row_stride(residual), eps, STREAMS=streams,
        WIDTH=width, BLOCK=block, num_warps=warps_for(block),
    )  # fmt: skip
    return out


def gate(projected: Tensor, rank: int, count: int, residual: Tensor | None) -> Tensor:
    """`GatedStreams.gate` in one launch."""
    projected = with_contiguous_rows(projected)
    tokens, out = len(projected), projected.new_empty(len(projected), rank)
    if not tokens:
        return out
    stride, width = (0, 0) if residual is None else (row_stride(residual), residual.shape[1] // count - 1)
    rank_gates_kernel[(tokens,)](
        projected, residual, out, row_stride(projected), stride, STREAMS=count, WIDTH=width, RANK=rank,
        BLOCK=next_power_of_2(rank), NUMBERS=next_power_of_2(count), num_warps=warps_for(next_power_of_2(rank)),
    )  # fmt: skip
    return out


def read(gates: Tensor, normed: Tensor, count: int) -> Tensor:
    """`GatedStreams.read` in one launch."""
    tokens, width = len(normed), normed.shape[1] // count
    out = normed.new_empty(tokens, width)
    block = min(_BLOCK, next_power_of_2(width))
    if tokens:
        read_gated_kernel[(tokens, triton.cdiv(width, block))](
            gates.contiguous(), normed, out, STREAMS=count, WIDTH=width, BLOCK=block, num_warps=warps_for(block)
        )
    return out


TRITON = GatedStreams(norm, gate, read)


def aot_cases() -> list[AotCase]:
    """Qwen3.8-Flash-Next, with the widths of transformers' defaults."""
    streams, width, rank = 4, 2048, 320
    every: dict[str, object] = {"STREAMS": streams, "WIDTH": width}
    warps, cases = warps_for(width), []
    for kind in ("bf16", "fp32"):
        signature = dict.fromkeys(("x", "residual", "out"), f"*{kind}") | {"weight": "*fp32", "x_stride": "i32:16"}
        signature |= {"residual_stride": "i32", "eps": "fp32"}
        constants, name = every | {"BLOCK": width}, f"norm of gated streams, {kind}"
        cases.append(AotCase(name, norm_gated_kernel, signature, constants, warps, 3, False))
        first = {name: of for name, of in signature.items() if name not in ("x", "x_stride")}
        alone = constants | {"x": None, "x_stride": 0}
        cases.append(AotCase(f"{name}, without a result", norm_gated_kernel, first, alone, warps, 3, False))
        signature = dict.fromkeys(("projected", "residual", "out"), f"*{kind}")
        signature |= dict.fromkeys(("projected_stride", "residual_stride"), "i32")
        constants = every | {"RANK": rank, "BLOCK": 512, "NUMBERS": streams}
        cases.append(AotCase(f"gates of rank, {kind}", rank_gates_kernel, signature, constants, 2, 3, False))
        signature = dict.fromkeys(("gates", "normed", "out"), f"*{kind}")
        constants, name = every | {"BLOCK": _BLOCK}, f"read of gated streams, {kind}"
        cases.append(AotCase(name, read_gated_kernel, signature, constants, warps_for(_BLOCK), 3, False))
    return cases
