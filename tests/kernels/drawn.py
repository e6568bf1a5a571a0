"""Random inputs of kernels, for their tests and for the GPU suite, on any device. Imports no pytest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.delta.protocol import DeltaInputs, DeltaShape, DeltaStates, DeltaWeights
from moe_engine.kernels.ops.residual_blocks import BlockWeights
from moe_engine.kernels.ops.streams import StreamWeights
from moe_engine.kernels.quantization.codes import CodedWeight, GroupCodes

Device = str | torch.device

# -- residual streams: n streams of some channels


def stream_weights(
    n: int, width: int, writes: bool = True, iterations: int = 20, device: Device = "cpu"
) -> StreamWeights:
    numbers = n * (2 + n) if writes else n
    fn = torch.randn(numbers, n * width, device=device) / (n * width) ** 0.5
    base, scale = torch.randn(numbers, device=device), 1 + 0.3 * torch.randn(numbers, device=device)
    return StreamWeights(fn, base, scale, n, iterations, 1e-6, 1e-6)


def late_weights(n: int, width: int, device: Device = "cpu") -> list[StreamWeights]:
    """Of late sums, the model's head last."""
    weights = [replace(stream_weights(n, width, iterations=k, device=device), late=True) for k in (20, 1, 3)]
    return [*weights, without_numbers(weights[0])]


def without_numbers(weights: StreamWeights) -> StreamWeights:
    return replace(weights, fn=weights.fn[:0], base=weights.base[:0], scale=weights.scale[:0])


def late_residual(n: int, width: int, tokens: int, device: Device = "cpu") -> Tensor:
    """Streams, and the weights of a part before; three numbers of others stand after them."""
    streams, weights = torch.randn(tokens, n * width + n + n * n, device=device), torch.rand(tokens, n, device=device)
    return torch.cat((streams, weights, torch.ones(tokens, 3, device=device)), 1)


# -- blocks of the residual

BLOCK_EPS = 1e-5


def block_weights(width: int, written: int, starts: bool = False, device: Device = "cpu") -> BlockWeights:
    norm, proj = 1 + 0.3 * torch.randn(width, device=device), 3 * torch.randn(width, device=device) / width**0.5
    return BlockWeights(norm, proj, BLOCK_EPS, written, starts)


def block_residual(count: int, width: int, tokens: int, device: Device = "cpu") -> Tensor:
    """`count` rows of each token, which differ in size."""
    sizes = 4 * torch.rand(tokens, count, 1, device=device)
    return (torch.randn(tokens, count, width, device=device) * sizes).flatten(1)


# -- weights of 4 bits


def coded_weight(form: GroupCodes, n: int, k: int, device: Device = "cpu") -> CodedWeight:
    """Random codes, all of them, with scales of several powers of two."""
    codes, groups = torch.randint(16, (n, k), dtype=torch.uint8, device=device), (n, k // form.group)
    powers = torch.exp2(torch.randint(-7, -2, groups, device=device).float())
    if form.mxfp4:
        return CodedWeight(codes, powers.bfloat16(), None, form)
    if form.nvfp4:
        scales = (powers * torch.randint(8, 16, groups, device=device)).to(torch.float8_e4m3fn)
        whole = torch.rand(1, device=device) + 0.5
        return CodedWeight(codes, (scales.double() * whole.double()).bfloat16(), None, form, whole=whole.expand(n))
    scales = (powers * (1 + torch.rand(groups, device=device)) / 4).to(getattr(torch, form.scales))
    zeros = torch.randint(16, groups, dtype=torch.uint8, device=device) if form.zeros else None
    return CodedWeight(codes, scales, zeros, form)


# -- gated delta nets


def delta_inputs(
    shape: DeltaShape, tokens: int, num_rows: int, dtype: torch.dtype, device: Device = "cpu"
) -> tuple[Any, ...]:
    """`DeltaInputs`, `DeltaWeights` and `DeltaStates` of `num_rows` rows."""
    wide = torch.randn(tokens, shape.key_heads * (shape.mixed + shape.shared * shape.value), device=device).to(dtype)
    inputs = DeltaInputs.adjacent(
        wide, torch.randn(tokens, shape.value_heads * (1 + shape.decays), device=device).to(dtype), shape
    )
    weights = DeltaWeights(
        torch.randn(shape.key_heads, shape.taps, shape.mixed, device=device),
        torch.empty(shape.value_heads, device=device).uniform_(0.01, 2).log(),
        torch.randn(shape.value_heads * shape.decays, device=device),
        1 + 0.2 * torch.randn(shape.value_heads * shape.value if shape.additive else shape.value, device=device),
        1e-6,
    )
    if shape.additive:
        bias, skip = (torch.randn(size, device=device) for size in ((shape.key_heads, shape.mixed), shape.value_heads))
        weights = replace(weights, conv_bias=bias, skip=skip)
    states = DeltaStates(
        torch.randn(num_rows, shape.key_heads, max(shape.taps - 1, 0), shape.mixed, device=device).to(dtype),
        torch.randn(num_rows, shape.value_heads, shape.key, shape.value, device=device),
    )
    return inputs, weights, states
