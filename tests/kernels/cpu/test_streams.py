"""Residual streams: the torch operation against transformers' hyper-connections, and C++ against torch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.ops.cpu import CpuOps
from moe_engine.kernels.ops.streams import MixStreams, StreamWeights, mix_streams
from tests.kernels.cpu.conftest import threads
from tests.kernels.drawn import late_residual, late_weights, stream_weights, without_numbers

SHAPES = [(4, 64, 1), (4, 1100, 3), (2, 2050, 5), (3, 40, 17), (1, 16, 2), (9, 24, 2)]
"""Streams, channels, tokens: parts of vectors, several tasks of a token, more streams than the kernel has."""


def check_mean(mix: MixStreams, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Before a head without numbers: the mean of the streams, before and after a result is added."""
    n, width, tokens = shape
    residual, x = torch.randn(tokens, n * width + n + n * n).to(dtype), torch.randn(tokens, width).to(dtype)
    found = run(mix, [x], residual, [without_numbers(stream_weights(n, width))] * 2)
    wide = residual.double()
    streams = wide[:, : n * width].view(tokens, n, width)
    written, mixed = wide[:, n * width :].split((n, n * n), 1)
    added = torch.einsum("tij,tid->tjd", mixed.view(tokens, n, n), streams) + written[:, :, None] * x[:, None].double()
    wanted = streams.mean(1), added.mean(1), torch.cat((added.flatten(1), written, mixed), 1)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, **dict.fromkeys(("rtol", "atol"), _BOUNDS[dtype]))


_BOUNDS = {torch.bfloat16: 4e-2, torch.float32: 1e-5}


def run(mix: MixStreams, inputs: list[Tensor], residual: Tensor, weights: list[StreamWeights]) -> list[Tensor]:
    """The sums before the first and after each of the inputs, and the residual."""
    residual = residual.clone()
    sums = [mix(None, residual, weights[0])]
    sums += [mix(x, residual, own) for x, own in zip(inputs, weights[1:])]
    return [*sums, residual]


@pytest.mark.parametrize("shape", SHAPES)
def test_cpp_equals_torch(any_library: Library, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    n, width, tokens = shape
    residual = torch.randn(tokens, n * width + n + n * n).to(dtype)
    inputs = [torch.randn(tokens, width).to(dtype) for _ in range(3)]
    weights = [stream_weights(n, width, iterations=k) for k in (20, 1, 3)] + [stream_weights(n, width, writes=False)]
    with threads(2):
        found = run(CpuOps(any_library).mix_streams, inputs, residual, weights)
    wanted = run(mix_streams, inputs, residual, weights)
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@pytest.mark.parametrize("shape", SHAPES)
def test_late_sums(library: Library, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    n, width, tokens = shape
    residual = late_residual(n, width, tokens).to(dtype)
    inputs, weights = [torch.randn(tokens, width).to(dtype) for _ in range(3)], late_weights(n, width)
    with threads(2):
        found = run(CpuOps(library).mix_streams, inputs, residual, weights)
    wanted = run(mix_streams, inputs, residual, weights)
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


def test_a_token_does_not_depend_on_others_and_on_threads(library: Library, dtype: torch.dtype) -> None:
    n, width, tokens = 4, 1500, 9
    residual = torch.randn(tokens, n * width + n + n * n).to(dtype)
    inputs, weights = [torch.randn(tokens, width).to(dtype)], [stream_weights(n, width), stream_weights(n, width)]
    mix = CpuOps(library).mix_streams
    with threads(2):
        together = run(mix, inputs, residual, weights)
    with threads(1):
        for t in range(tokens):
            part = slice(t, t + 1)
            alone = run(mix, [x[part] for x in inputs], residual[part], weights)
            assert all(torch.equal(one, all_[part]) for one, all_ in zip(alone, together, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_mean_of_streams(library: Library, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    for mix in (mix_streams, CpuOps(library).mix_streams):
        check_mean(mix, shape, dtype)


def test_strided_inputs(library: Library) -> None:
    n, width = 4, 48
    wide = torch.randn(6, n * width + n + n * n + 7)
    residual, x = wide[1:5, :-7], torch.randn(6, 2 * width)[1:5, :width]
    weights = stream_weights(n, width)
    wanted = run(mix_streams, [x], residual, [weights, weights])
    before = wide.clone()
    sums = [CpuOps(library).mix_streams(None, residual, weights), CpuOps(library).mix_streams(x, residual, weights)]
    for one, other in zip([*sums, residual], wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert torch.equal(wide[:, -7:], before[:, -7:]) and torch.equal(wide[0], before[0])


def test_torch_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

    n, width, tokens = random.choice([2, 4]), 24, 7
    config = transformers.DeepseekV4Config(hidden_size=width, hc_mult=n, num_hidden_layers=2)
    connections = [theirs.DeepseekV4HyperConnection(config) for _ in range(2)]
    head = theirs.DeepseekV4HyperHead(config)
    weights = []
    for module in connections:
        own, scale = stream_weights(n, width), torch.randn(3)
        module.fn.data, module.base.data, module.scale.data = own.fn, own.base, scale
        weights.append(replace(own, scale=torch.cat([s.expand(c) for s, c in zip(scale, (n, n, n * n))])))
    own, scale = stream_weights(n, width, writes=False), torch.randn(1)
    head.hc_fn.data, head.hc_base.data, head.hc_scale.data = own.fn, own.base, scale
    weights.append(replace(own, scale=scale.expand(n).contiguous()))
    streams = torch.randn(1, tokens, n, width)
    inputs = [torch.randn(tokens, width) for _ in range(2)]
    residual = torch.cat((streams.flatten(2)[0], torch.zeros(tokens, n + n * n)), 1)
    found = run(mix_streams, inputs, residual, weights)
    wanted = []
    with torch.no_grad():
        for module, x in zip(connections, inputs):
            post, comb, collapsed = module(streams)
            wanted.append(collapsed[0])
            streams = post.unsqueeze(-1) * x.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), streams)
        wanted.append(head(streams)[0])
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
