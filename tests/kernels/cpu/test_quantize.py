"""Weights that the C++ library quantizes while it packs them, and its values of FP8 weights, against torch."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.cpu import fp8_weights
from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.linear.cpu import CpuLinear
from moe_engine.kernels.quantization.codes import CodedWeight, GroupCodes, PlainWeight
from moe_engine.kernels.quantization.protocol import FP8
from moe_engine.kernels.quantization.quantize import quantize_codes
from moe_engine.kernels.quantization.reference import dequantize_weight, quantize_weight

FORMATS = [
    GroupCodes(4, 32),
    GroupCodes(4, 256),
    GroupCodes(4, 520, scales="float32"),  # in parts, the last one short
    GroupCodes(8, 0, scales="float32"),
    GroupCodes(8, 40),
]


def near(found: Tensor, want: Tensor, weight: Tensor, group: int) -> None:
    """The same values; in a group with two scales of the same error either may be chosen."""
    differs = (found != want).view(len(found), -1, group).any(-1)
    errors = [(values - weight).view(len(found), -1, group).square().sum(-1) for values in (found, want)]
    torch.testing.assert_close(errors[0][differs], errors[1][differs], rtol=1e-5, atol=0)
    assert int(differs.sum()) <= differs.numel() // 50 + 1


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_codes_are_those_of_torch(any_library: Library, format: GroupCodes, dtype: torch.dtype) -> None:
    n, k = random.randrange(1, 70), format.group * random.randrange(1, 4) or 8 * random.randrange(1, 90)
    weight = (torch.randn(n, k + 24) * torch.rand(n, 1).exp())[:, 8 : k + 8].to(dtype)
    weight[0] = 0
    coded = CodedWeight.empty(format, n, k, "cpu")
    quantize_codes(weight, coded)
    kernel, unit = CpuLinear(any_library), torch.eye(k)
    found = kernel.run(unit, kernel.prepare_coded(PlainWeight(weight, format), None)).T
    near(found, coded.dequantized(), weight.float(), format.group_of(k))
    exact = kernel.run(unit, kernel.prepare_coded(coded, None)).T
    assert torch.equal(exact, coded.dequantized())
    whole = weight.contiguous()
    kept = kernel.prepare_coded(PlainWeight(whole, format, kept=True), None)
    assert torch.equal(kernel.run(unit, kept).T, found) and torch.equal(whole, found.to(dtype))


def test_formats_without_a_quantization_are_refused(library: Library) -> None:
    for format in (GroupCodes(4, 32, zeros=True), GroupCodes(4, 32, scales="float16"), GroupCodes(4, 32, values="fp4")):
        with pytest.raises(ValueError, match="weights are not quantized to"):
            CpuLinear(library).prepare_coded(PlainWeight(torch.randn(16, 64), format), None)


@pytest.mark.parametrize("stored", [FP8, torch.float8_e5m2], ids=str)
def test_values_of_fp8(
    any_library: Library, stored: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_weights, "load", lambda: any_library)
    n, k = random.randrange(1, 80), random.randrange(1, 200)
    block = random.choice([(128, 128), (16, 32), (1, k + 50), (7, 5)])
    first = random.randrange(40), random.randrange(40)
    weight = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    weight[(weight & 0x7F) >= 0x7C] = 3  # infinities and NaN of e5m2
    grid = [-(-(size + start) // by) for size, start, by in zip((n, k), first, block)]
    scales, out = torch.rand(*grid) + 0.1, torch.empty(n, k + 3, dtype=dtype)[:, :k]
    if stored == FP8:
        weight[0, 0] = 0x7F  # NaN
    values = weight.view(stored)
    assert fp8_weights.fp8_values(out, values, scales, block, first)
    rows = (torch.arange(n) + first[0]) // block[0]
    columns = (torch.arange(k) + first[1]) // block[1]
    want = (values.float() * scales[rows][:, columns]).to(dtype)
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


def test_weights_rounded_to_fp8(any_library: Library, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_weights, "load", lambda: any_library)
    weight = (torch.randn(random.randrange(1, 300), random.randrange(1, 300)) * 0.02).to(dtype)
    weight[:, :9] = 0
    want = dequantize_weight(quantize_weight(weight)).to(dtype)
    rounded = fp8_weights.fp8_rounding(weight)
    assert rounded is not None
    rounded()
    assert torch.equal(weight, want)
