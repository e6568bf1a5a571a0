"""Activations to FP8: the interpreter's casts, and the kernels against the reference and the format's own bounds."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_engine.kernels.gate_form import GELU_LIMIT
from moe_engine.kernels.quantization import reference, triton_rows
from moe_engine.kernels.quantization.protocol import BLOCK, FP8, FP8_MAX, MIN_AMAX, QuantizedRows
from tests.kernels.cpu.formulas import bounded_silu, close, normal, rms_norm

HALF_STEP = 2.0**-4  # of an e4m3 number: 3 bits of mantissa
SMALLEST_STEP = 2.0**-9
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinity times zero
POWERS = pytest.mark.parametrize("power_of_two", [False, True], ids=["float32", "ue8m0"])


@triton.jit
def cast_kernel(x, out, N: tl.constexpr):
    lane = tl.arange(0, N)
    tl.store(out + lane, tl.load(x + lane).to(out.dtype.element_ty))


def wide(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Numbers of very different magnitudes, with small blocks and zeros."""
    x = torch.randn(*shape) * torch.exp2(torch.randint(-14, 10, (shape[0], 1)).float())
    x[:, : shape[1] // 3] *= 1e-3
    return torch.where(torch.rand(*shape) < 0.02, 0.0, x).to(dtype)


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float16])
def test_casts_of_the_interpreter_are_torchs(dtype: torch.dtype) -> None:
    x = torch.randn(4096) * torch.exp2(torch.randint(-14, 9, (4096,)).float())
    x = torch.cat((x, torch.tensor([0.0, -0.0, 448, -448, 464, 6e4, -6e4, 2**-9, 2**-10, 1.5 * 2**-9] * 16)))[-4096:]
    out = torch.empty(4096, dtype=dtype)
    cast_kernel[(1,)](x, out, N=4096)
    want = x.clamp(-FP8_MAX, FP8_MAX) if dtype == FP8 else x
    assert torch.equal(out.view(torch.uint8), want.to(dtype).view(torch.uint8))
    back = torch.empty(4096)
    cast_kernel[(1,)](out, back, N=4096)
    assert torch.equal(back, out.float())


def check(got: QuantizedRows, x: Tensor, power_of_two: bool) -> None:
    """Compared with x [M, K] in float64, by the rules of the format."""
    assert got.data.dtype == FP8 and got.data.is_contiguous() and got.data.shape == x.shape
    assert got.scales.stride(0) == 1 and got.scale_stride % 4 == 0
    blocks = [part.double() for part in x.split(BLOCK, 1)]
    least = torch.stack([part.abs().amax(1).clamp_min(MIN_AMAX) / FP8_MAX for part in blocks], 1)
    scales = got.scales.double()
    if power_of_two:
        assert (torch.frexp(scales)[0] == 0.5).all()
        assert (scales >= least * (1 - 1e-6)).all() and (scales < 2 * least * (1 + 1e-6)).all()
    else:
        torch.testing.assert_close(scales, least, rtol=1e-6, atol=0)
    spread = scales.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    error = (reference.dequantize_rows(got, torch.float64) - x.double()).abs()
    allowed = torch.maximum(x.double().abs() * HALF_STEP, spread * SMALLEST_STEP / 2) * (1 + 1e-5)
    assert (error <= allowed).all(), float((error / allowed).max())


def agree(got: QuantizedRows, want: QuantizedRows) -> None:
    """Equal scales, and equal numbers except for ties decided by an earlier rounding, which give neighbors: two
    numbers, or a hundredth of many."""
    torch.testing.assert_close(got.scales, want.scales, rtol=1e-6, atol=0)
    numbers, others = got.data.double(), want.data.double()
    step = torch.maximum(torch.maximum(numbers.abs(), others.abs()) * 2 * HALF_STEP, torch.tensor(SMALLEST_STEP))
    assert ((numbers - others).abs() <= step).all()
    assert int((numbers != others).sum()) <= max(2, numbers.numel() // 100)


@POWERS
@pytest.mark.parametrize("shape", [(1, 128), (3, 40), (37, 300), (16, 257)])
def test_quantize_rows(shape: tuple[int, int], power_of_two: bool) -> None:
    whole = wide(shape[0], shape[1] + 24)
    x = whole[:, 8 : 8 + shape[1]]
    got = triton_rows.quantize_rows(x, power_of_two)
    check(got, x, power_of_two)
    agree(got, reference.quantize_rows(x, power_of_two))
    check(reference.quantize_rows(x, power_of_two), x, power_of_two)


@POWERS
@pytest.mark.parametrize(("rows", "width"), [(5, 64), (33, 384), (2, 200)])
def test_silu_mul_quantize(rows: int, width: int, power_of_two: bool) -> None:
    gate_up = normal(rows, 2 * width + 10, dtype=torch.bfloat16, scale=3.0)[:, 4 : 4 + 2 * width]
    gate, up = gate_up.double().chunk(2, 1)
    for limit in (0.0, 1.5, GELU_LIMIT):
        got = triton_rows.silu_mul_quantize(gate_up, power_of_two, limit=limit)
        check(got, bounded_silu(gate, up, limit).float(), power_of_two)
        agree(got, reference.silu_mul_quantize(gate_up, power_of_two, limit=limit))


@POWERS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(1, 96), (9, 400)])
def test_rms_norm_quantize(rows: int, width: int, dtype: torch.dtype, power_of_two: bool) -> None:
    x, weight = normal(rows, width, dtype=dtype, scale=4.0), torch.rand(width) + 0.5
    stream = normal(rows, width, dtype=dtype)
    sums = (x.float() + stream.float()).to(dtype)
    for residual, source in ((None, x), (stream.clone(), sums)):
        normed, got = triton_rows.rms_norm_quantize(x, weight, 1e-6, residual, power_of_two)
        close(normed, rms_norm(source, weight, 1e-6), 2)
        check(got, normed, power_of_two)
        if residual is None:
            nothing, alone = triton_rows.rms_norm_quantize(x, weight, 1e-6, None, power_of_two, keep=False)
            assert nothing is None and torch.equal(alone.data.float(), got.data.float())
            assert torch.equal(alone.scales, got.scales)
        else:
            assert torch.equal(residual, sums)
            want_normed, want = reference.rms_norm_quantize(x, weight, 1e-6, stream.clone(), power_of_two)
            close(want_normed, rms_norm(source, weight, 1e-6), 2)
            agree(got, want)


def test_scales_as_exponents() -> None:
    """The bytes of power-of-two scales, by every kernel that quantizes rows; zeros after the last block."""
    for rows, width in ((1, 128), (5, 640), (18, 1100)):
        x, weight = normal(rows, 2 * width, dtype=torch.bfloat16, scale=3.0), torch.rand(width) + 0.5
        half = x[:, :width].contiguous()
        norm = (half, weight, 1e-6, None, True, False, None)
        pairs = (
            [triton_rows.quantize_rows(half, True, form) for form in (False, True)],
            [triton_rows.silu_mul_quantize(x, True, form) for form in (False, True)],
            [triton_rows.rms_norm_quantize(*norm, form)[1] for form in (False, True)],
            [reference.quantize_rows(half, True, form) for form in (False, True)],
        )
        for plain, got in pairs:
            assert got.exponents and not plain.exponents and torch.equal(got.data.float(), plain.data.float())
            blocks = -(-width // BLOCK)
            assert got.scales.shape == (rows, -(-blocks // 4)) and got.scales.stride(0) == 1
            bytes_ = got.scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)
            assert torch.equal(torch.exp2(bytes_[:, :blocks].double() - 127), plain.scales.double())
            assert not bytes_[:, blocks:].any()
            assert torch.equal(reference.dequantize_rows(got), reference.dequantize_rows(plain))


def test_what_is_no_number_shows() -> None:
    x = torch.randn(3, 256)
    x[0, 5], x[1, 200] = torch.nan, torch.inf
    got = triton_rows.quantize_rows(x)
    back = reference.dequantize_rows(got)
    assert back[0, 5].isnan() and back[0, 128:].isfinite().all()
    assert not back[1, 200].isfinite() and back[2].isfinite().all()


def test_no_rows_and_a_stream_with_gaps() -> None:
    empty = torch.empty(0, 256)
    assert triton_rows.quantize_rows(empty).data.shape == (0, 256)
    assert triton_rows.silu_mul_quantize(empty).scales.shape == (0, 1)
    assert triton_rows.rms_norm_quantize(empty, torch.ones(256), 1e-6)[0].shape == (0, 256)
    with pytest.raises(ValueError, match="contiguous"):
        triton_rows.rms_norm_quantize(torch.ones(2, 8), torch.ones(8), 1e-6, torch.ones(2, 16)[:, :8])


@POWERS
def test_weights_of_the_reference(power_of_two: bool) -> None:
    weight = torch.randn(300, 200) * torch.exp2(torch.randint(-9, 9, (300, 1)).float())
    weight[:128, :128] *= 100
    quantized = reference.quantize_weight(weight, power_of_two)
    assert quantized.scales.shape == (3, 2) and quantized.num_bytes == 300 * 200 + 24
    spread = quantized.scales.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:300, :200]
    error = (reference.dequantize_weight(quantized, torch.float64) - weight.double()).abs()
    allowed = torch.maximum(weight.double().abs() * HALF_STEP, spread * SMALLEST_STEP / 2) * (1 + 1e-5)
    assert (error <= allowed).all()
    assert (spread >= weight.double().abs() / FP8_MAX * (1 - 1e-6)).all()
    part = quantized.rows(128, 300)
    assert torch.equal(reference.dequantize_weight(part), reference.dequantize_weight(quantized)[128:])
    with pytest.raises(ValueError, match="cut a block"):
        quantized.rows(64, 300)
