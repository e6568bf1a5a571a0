"""Attention over blocks of the residual: the torch operation against its formula in float64, and C++ against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.ops.cpu import CpuOps
from moe_engine.kernels.ops.residual_blocks import BlockWeights, MixBlocks, mix_blocks
from tests.kernels.cpu.conftest import threads
from tests.kernels.cpu.formulas import rms_norm
from tests.kernels.drawn import BLOCK_EPS, block_residual, block_weights

SHAPES = [(9, 64, 5), (3, 1100, 1), (1, 40, 17), (5, 7168, 2), (17, 24, 3), (70, 16, 2)]
"""Rows of a token, channels, tokens: parts of vectors, several iterations, more rows than a kernel has."""


def drawn(count: int, width: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor], list[BlockWeights]]:
    """A residual whose rows differ in size, results, and weights: the first row alone, then two results in each."""
    residual = block_residual(count, width, tokens).to(dtype)
    inputs = [torch.randn(tokens, width).to(dtype) for _ in range(2 * (count - 1))]
    later = [block_weights(width, row, starts) for row in range(1, count) for starts in (True, False)]
    return residual, inputs, [block_weights(width, 0), *later]


def run(
    mix: MixBlocks, residual: Tensor, inputs: list[Tensor], weights: list[BlockWeights], norm: Tensor | None
) -> list[Tensor]:
    """The sums before the first and after each of the inputs, and the residual."""
    residual = residual.clone()
    sums = [mix(None, residual, weights[0], norm)]
    sums += [mix(x, residual, own, norm) for x, own in zip(inputs, weights[1:], strict=True)]
    return [*sums, residual]


def wanted(x: Tensor | None, rows: Tensor, weights: BlockWeights) -> tuple[Tensor, Tensor]:
    """rows [T, N, D] float64 after x is added, and their weighted sum."""
    rows = rows.clone()
    if x is not None:
        rows[:, weights.written] = x if weights.starts else rows[:, weights.written] + x
    seen = rows[:, : weights.written + 1]
    keys = seen / (seen.square().mean(-1, keepdim=True) + weights.eps).sqrt() * weights.norm.double()
    shares = (keys @ weights.proj.double()).softmax(-1)
    return rows, (shares.unsqueeze(-1) * seen).sum(1)


@pytest.mark.parametrize("shape", SHAPES[:4])
def test_torch_equals_the_formula(shape: tuple[int, int, int]) -> None:
    count, width, tokens = shape
    residual, inputs, weights = drawn(count, width, tokens, torch.float32)
    norm = 1 + 0.3 * torch.randn(width)
    found = run(mix_blocks, residual, inputs, weights, norm)
    plain = run(mix_blocks, residual, inputs, weights, None)
    rows = residual.double().unflatten(1, (count, width))
    for place, (x, own) in enumerate(zip([None, *inputs], weights, strict=True)):
        rows, want = wanted(None if x is None else x.double(), rows, own)
        torch.testing.assert_close(plain[place].double(), want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[place].double(), rms_norm(want, norm, BLOCK_EPS), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[-1].double(), rows.flatten(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normed", [True, False])
def test_cpp_equals_torch(any_library: Library, dtype: torch.dtype, shape: tuple[int, int, int], normed: bool) -> None:
    count, width, tokens = shape
    drawing = drawn(count, width, tokens, dtype)
    norm = 1 + 0.3 * torch.randn(width) if normed else None
    with threads(2):
        found = run(CpuOps(any_library).mix_blocks, *drawing, norm)
    bound = 3e-2 if dtype == torch.bfloat16 else 1e-4
    for one, other in zip(found, run(mix_blocks, *drawing, norm), strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


def test_strided_inputs(library: Library) -> None:
    """Rows of a token that are not mixed, memory after them and other tokens stay as they are."""
    width = 40
    wide, x = torch.randn(6, 5 * width + 7), torch.randn(6, 2 * width)[1:5, :width]
    for mix in (CpuOps(library).mix_blocks, mix_blocks):
        own, weights = wide.clone(), block_weights(width, 2, starts=True)
        got = mix(x, own[1:5, : 5 * width], weights, None)
        _, want = wanted(x.double(), wide[1:5, : 5 * width].double().unflatten(1, (5, width)), weights)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
        assert torch.equal(own[1:5, 2 * width : 3 * width], x)
        own[1:5, 2 * width : 3 * width] = wide[1:5, 2 * width : 3 * width]
        assert torch.equal(own, wide)
        assert mix(None, own[:0, : 5 * width], weights, None).shape == (0, width)
