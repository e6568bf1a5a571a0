"""Residual streams in Triton, under the interpreter, against the torch operation (`tests/kernels/cpu/test_streams.py`
compares that with transformers)."""

from __future__ import annotations

import pytest
import torch

from moe_engine.kernels.ops.streams import mix_streams
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, ActivationFormat
from tests.kernels.cpu.test_streams import check_mean, run
from tests.kernels.drawn import late_residual, late_weights, stream_weights

triton_streams = pytest.importorskip("moe_engine.kernels.ops.triton_streams", reason="needs triton")
TritonOps = pytest.importorskip("moe_engine.kernels.ops.triton_ops", reason="needs triton").TritonOps

SHAPES = [(4, 64, 1), (4, 1100, 3), (2, 130, 17), (3, 40, 5), (1, 16, 2), (9, 24, 2)]
"""Streams, channels, tokens: parts of blocks, several programs of tokens and of channels, more streams than a kernel
has."""
FORMATS = [UNQUANTIZED, ActivationFormat(True, True), ActivationFormat.fp8(True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_streams(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    n, width, tokens = shape
    residual = torch.randn(tokens, n * width + n + n * n).to(dtype)
    inputs = [torch.randn(tokens, width).to(dtype) for _ in range(3)]
    weights = [stream_weights(n, width, iterations=k) for k in (20, 1, 3)] + [stream_weights(n, width, writes=False)]
    mix = TritonOps().capabilities.mix_streams
    found, wanted = run(mix, inputs, residual, weights), run(mix_streams, inputs, residual, weights)
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_late_sums(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    n, width, tokens = shape
    residual = late_residual(n, width, tokens).to(dtype)
    inputs, weights = [torch.randn(tokens, width).to(dtype) for _ in range(3)], late_weights(n, width)
    mix = TritonOps().capabilities.mix_streams
    found, wanted = run(mix, inputs, residual, weights), run(mix_streams, inputs, residual, weights)
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_the_norm_of_what_is_read(format: ActivationFormat, late: bool) -> None:
    """The same values as by launches of their own, for streams of several blocks; more streams than a kernel has."""
    for n, width in ((4, 300), (9, 24)):
        line = late_residual(n, width, 3) if late else torch.randn(3, n * width + n + n * n)
        weights, norm = (late_weights if late else stream_weights)(n, width), torch.rand(width) + 0.5
        weights = weights[0] if isinstance(weights, list) else weights
        ops, x, residuals = TritonOps(), torch.randn(3, width).bfloat16(), [line.bfloat16(), line.bfloat16()]
        read = triton_streams.mix(x, residuals[0], weights)
        found = triton_streams.mix_norm(x, residuals[1], weights, format, norm, 1e-5)
        assert torch.equal(*residuals)
        if format.rows:
            wanted = ops.rms_norm_quantized(format, read, norm, 1e-5)
            assert torch.equal(found.rows.data.view(torch.uint8), wanted.rows.data.view(torch.uint8))
            assert torch.equal(found.rows.scales, wanted.rows.scales)
            found, read = found.unquantized, wanted.unquantized
        else:
            read = ops.rms_norm(read, norm, 1e-5)
        assert (found is None and not format.unquantized) or torch.equal(found, read)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_mean_of_streams(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_mean(triton_streams.mix, shape, dtype)


def test_a_token_does_not_depend_on_others() -> None:
    n, width, tokens = 4, 100, 19
    residual = torch.randn(tokens, n * width + n + n * n).bfloat16()
    inputs, weights = [torch.randn(tokens, width).bfloat16()], [stream_weights(n, width), stream_weights(n, width)]
    together = run(triton_streams.mix, inputs, residual, weights)
    for t in (0, 15, 18):
        part = slice(t, t + 1)
        alone = run(triton_streams.mix, [x[part] for x in inputs], residual[part], weights)
        assert all(torch.equal(one, all_[part]) for one, all_ in zip(alone, together, strict=True))


def test_strided_inputs_and_no_tokens() -> None:
    n, width = 4, 48
    wide = torch.randn(6, n * width + n + n * n + 7)
    residual, x, before = wide[1:5, :-7], torch.randn(6, 2 * width)[1:5, :width], wide.clone()
    weights = stream_weights(n, width)
    wanted = run(mix_streams, [x], residual, [weights, weights])
    found = [triton_streams.mix(None, residual, weights), triton_streams.mix(x, residual, weights), residual]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert torch.equal(wide[:, -7:], before[:, -7:]) and torch.equal(wide[0], before[0])
    assert triton_streams.mix(None, residual[:0], weights).shape == (0, width)
