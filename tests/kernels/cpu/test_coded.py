"""C++ products with weights of 4 and 8 bits against float64."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.cpu.library import PATHS, Library
from moe_engine.kernels.device import cpu_device
from moe_engine.kernels.experts.batch import ExpertBatch
from moe_engine.kernels.experts.cpu import CpuExperts
from moe_engine.kernels.gate_form import GELU, GatedActivation
from moe_engine.kernels.linear.cpu import CpuLinear
from moe_engine.kernels.quantization.codes import FP4, IQ4, Coded, CodedWeight, GroupCodes, PlainCodes, PlainWeight
from tests.kernels.cpu.conftest import without_tiles

FORMATS = [
    GroupCodes(4, 32),
    GroupCodes(4, 128, scales="float16"),
    GroupCodes(4, 64, zeros=True, scales="float16"),
    GroupCodes(4, 32, zeros=True, scales="float16"),
    GroupCodes(4, 32, values=FP4),
    GroupCodes(4, 32, values=IQ4, scales="float16"),
    GroupCodes(4, 32, values=IQ4, scales="float32"),
    GroupCodes(4, 16, scales="float16", factors=16),
    GroupCodes(8, 0, scales="float32"),
    GroupCodes(8, 32, zeros=True),
    GroupCodes(4, 32, scales="float16", factors=4),
    GroupCodes(8, 16, scales="float16", factors=2),
    GroupCodes(8, 16, scales="float16", factors=8),
]


def drawn(format: GroupCodes, n: int, k: int) -> CodedWeight:
    weight = format.empty(n, k, "cpu")
    weight.codes.copy_(torch.randint(0, 1 << format.bits, (n, k)))
    weight.scales.copy_(torch.rand(weight.scales.shape) * 0.02 + 0.002)
    if format.mxfp4:
        weight.scales.copy_(2.0 ** torch.randint(-9, -5, weight.scales.shape))
    if weight.zeros is not None:
        weight.zeros.copy_(torch.randint(0, 1 << format.bits, weight.zeros.shape))
    if weight.factors is not None:
        weight.factors.copy_(torch.randint(0, 64, weight.factors.shape))
        weight.scales.div_(32)
    return weight


def near(found: Tensor, want: Tensor, x: Tensor, weight: Tensor, offset: float) -> None:
    """Within the error of sums in float32, and of the result's rounding; bf16 rows may be integers of 16 bits."""
    size = x.double().abs() @ (weight.double().abs() + offset).T
    bound = size * 2.0**-18 + want.abs() * 2.0**-22 + 1e-6
    if found.dtype == torch.bfloat16:
        largest = x.double().abs().amax(1, keepdim=True)
        bound += want.abs() * 2.0**-8 + largest * (weight.double().abs() + offset).sum(1) * 2.0**-16
    assert ((found.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_products(any_library: Library, format: GroupCodes, dtype: torch.dtype) -> None:
    """Any number of rows; each row has the same bits alone and in a batch."""
    n, k = 75, 256
    kernel, weight = CpuLinear(any_library, deterministic=True), drawn(format, n, k)
    bias = torch.randn(n, dtype=dtype)
    prepared = kernel.prepare_coded(weight, bias)
    padded = -(-n // 16) * 16
    assert prepared.num_bytes == format.num_bytes(padded, k) + 4 * padded
    values = weight.dequantized()
    x = torch.randn(21, 2 * k, dtype=dtype)[:, :k]
    want = x.double() @ values.double().T + bias.double()
    found = kernel.run(x, prepared)
    offset = float((weight.scales[..., 1].max() * 63) if format.factors else 0)  # it cancels parts of the codes
    near(found, want, x, values, offset)
    for rows in (slice(0, 1), slice(3, 5), slice(4, 11), slice(20, 21)):
        assert torch.equal(kernel.run(x[rows], prepared), found[rows])


@pytest.fixture(scope="module")
def vectors(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Library:
    if library.path != PATHS[3]:
        pytest.skip(f"no AMX here, but {library.path}: the emulated tiles are tested by test_products")
    return without_tiles(library, tmp_path_factory.mktemp("library"))


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_tiles_have_the_bits_of_vectors(library: Library, vectors: Library, format: GroupCodes) -> None:
    """Of any number of rows and of columns, groups of any size: sums of a block are exact."""
    if format.group and not format.factors:
        format = replace(format, group=format.group * random.choice((1, 2, 3)))
    unit = (format.group or 8) * (format.factors or 1)
    for _ in range(4):
        n, k, m = random.randint(1, 150), unit * random.randint(1, -(-1200 // unit)), random.randint(1, 70)
        weight, x = drawn(format, n, k), torch.randn(m, k, dtype=torch.bfloat16) * random.choice((1e-3, 1.0, 300.0))
        x[random.randrange(m), : k // 2] = 0
        x[random.randrange(m)] = random.choice((-1, 1))  # with codes all alike, the largest sums
        weight.codes[random.randrange(n)] = random.choice((0, (1 << format.bits) - 1))
        kernels = (CpuLinear(one, deterministic=True) for one in (library, vectors))
        found, want = (kernel.run(x, kernel.prepare_coded(weight, None)) for kernel in kernels)
        assert torch.equal(found, want), (n, k, m)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_experts_on_tiles_have_the_bits_of_vectors(library: Library, vectors: Library, format: GroupCodes) -> None:
    """Routed tokens, some experts with many rows and some with few."""
    experts, hidden, width, tokens = 3, 256, 512, random.randint(40, 130)
    parts = [[drawn(format, *shape) for shape in 2 * [(width, hidden)] + [(hidden, width)]] for _ in range(experts)]
    x, weights = torch.randn(tokens, hidden, dtype=torch.bfloat16), torch.rand(tokens, 2)
    ids = torch.randint(0, experts - 1, (tokens, 2), dtype=torch.int32)
    ids[: random.randint(0, 20), 1] = experts - 1
    found = []
    for kernel in (CpuExperts(one, deterministic=True) for one in (library, vectors)):
        stored = kernel.allocate_coded(experts, hidden, width, "cpu", format)
        for expert in range(experts):
            kernel.load_coded(stored, expert, *parts[expert])
        stored.activation = GatedActivation(1.0)
        found.append(kernel.run_routed(x, weights, ids, stored))
    assert torch.equal(*found)


MANY = [*FORMATS, PlainCodes(4, 32), PlainCodes(4, 128)]


def decodes(library: Library) -> bool:
    """Whether panels are decoded for many rows: no CPU has AMX without VNNI, but emulated tiles run on any."""
    return library.path == PATHS[3] and "avx512_vnni" in cpu_device().cpu_flags


def packable(format: GroupCodes, n: int, k: int) -> tuple[Coded, Tensor]:
    """A weight, and its values, once it is packed."""
    if not isinstance(format, PlainCodes):
        weight = drawn(format, n, k)
        return weight, weight.dequantized()
    values = torch.randn(n, k)
    return PlainWeight(values, format, kept=True), values


@pytest.mark.parametrize("format", MANY, ids=str)
def test_many_rows(any_library: Library, format: GroupCodes) -> None:
    """Their products decode panels: those of 4 bits that are exact have the bits of the values' product."""
    kernel, exact = CpuLinear(any_library), format.bits == 4 and format.exact_in_bf16
    for _ in range(3):
        unit = (format.group or 8) * (format.factors or 1)
        n, k = random.randint(1, 300), unit * random.randint(1, -(-random.choice((1500, 5000)) // unit))
        m = random.choice((random.randint(32, 127), random.randint(128, 480)))
        weight, values = packable(format, n, k)
        x, bias = torch.randn(m, k + 32, dtype=torch.bfloat16)[:, :k], torch.randn(n, dtype=torch.bfloat16)
        found = kernel.run(x, kernel.prepare_coded(weight, bias))
        assert not exact or torch.equal(values, values.bfloat16().float())
        offset = float(weight.scales[..., 1].max() * 63) if format.factors else 0.0
        near(found, x.double() @ values.double().T + bias.double(), x, values, offset)
        if decodes(any_library) and exact:
            assert torch.equal(found, kernel.run(x, kernel.prepare(values.bfloat16(), bias))), (n, k, m)


@pytest.mark.parametrize("format", MANY, ids=str)
def test_many_rows_of_experts(any_library: Library, format: GroupCodes) -> None:
    """Of many tokens, with few rows of one expert."""
    experts, hidden, width, tokens = 3, 256, 512, random.randint(100, 700)
    kernel = CpuExperts(any_library)
    stored = kernel.allocate_coded(experts, hidden, width, "cpu", format)
    plain = kernel.allocate(experts, hidden, width, torch.bfloat16, "cpu")
    for expert in range(experts):
        parts = [packable(format, *shape) for shape in 2 * [(width, hidden)] + [(hidden, width)]]
        kernel.load_coded(stored, expert, *(weight for weight, _ in parts))
        kernel.load_expert(plain, expert, *(values.bfloat16() for _, values in parts))
    x, weights = torch.randn(tokens, hidden, dtype=torch.bfloat16), torch.rand(tokens, 2)
    ids = torch.randint(0, experts - 1, (tokens, 2), dtype=torch.int32)
    ids[: random.randint(0, 20), 1] = experts - 1
    found, want = (kernel.run_routed(x, weights, ids, one) for one in (stored, plain))
    if decodes(any_library) and format.bits == 4 and format.exact_in_bf16:
        assert torch.equal(found, want)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=0.02 * float(want.abs().max()))


def test_deterministic_rows_have_the_same_bits_in_any_number(any_library: Library) -> None:
    format = random.choice(MANY)
    kernel, (weight, _) = CpuLinear(any_library, deterministic=True), packable(format, 40, 256)
    prepared, x = kernel.prepare_coded(weight, None), torch.randn(100, 256, dtype=torch.bfloat16)
    assert torch.equal(kernel.run(x, prepared)[7:9], kernel.run(x[7:9], prepared))


@pytest.mark.parametrize("squared", [False, True], ids=["gate", "no gate"])
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.each_value
def test_experts(any_library: Library, format: GroupCodes, dtype: torch.dtype, squared: bool) -> None:
    """Routed tokens, and rows in groups, with the numbers of the plain kernel on dequantized weights."""
    experts, hidden, width = 5, 256, 512
    kernel, first = CpuExperts(any_library), width // 2 if squared else width
    stored = kernel.allocate_coded(experts, hidden, width, "cpu", format, squared)
    plain = kernel.allocate(experts, hidden, width, dtype, "cpu", squared)
    for expert in range(experts):
        parts = [drawn(format, *shape) for shape in ((first, hidden), (first, hidden), (hidden, width))]
        kernel.load_coded(stored, expert, *parts)
        kernel.load_expert(plain, expert, *(part.dequantized().to(dtype) for part in parts))
    assert stored.num_bytes == experts * (2 * format.num_bytes(first, hidden) + format.num_bytes(hidden, width))
    if not squared:
        forms = GatedActivation(1.0), GELU, GatedActivation(2.0, beta=0.7)
        stored.activation = plain.activation = random.choice(forms)
    x, ids = torch.randn(9, hidden, dtype=dtype), torch.randint(0, experts, (9, 3), dtype=torch.int32)
    weights = torch.rand(9, 3)
    want = kernel.run_routed(x, weights, ids, plain)
    bound = (1e-5 if dtype == torch.float32 else 0.02) * float(want.abs().max())
    torch.testing.assert_close(kernel.run_routed(x, weights, ids, stored), want, rtol=1e-4, atol=bound)
    batch = ExpertBatch("grouped", x, offsets=torch.tensor([0, 2, 2, 5, 8, 9], dtype=torch.int32))
    want = kernel.run(batch, plain)
    bound = (1e-5 if dtype == torch.float32 else 0.02) * float(want.abs().max())
    torch.testing.assert_close(kernel.run(batch, stored), want, rtol=1e-4, atol=bound)


def test_every_float16_scale(any_library: Library) -> None:
    """Finite scales of all signs and exponents, subnormal ones too: products of rows with a single one are exact."""
    weight = drawn(GroupCodes(4, 32, scales="float16"), 2048, 1024)
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    weight.scales.copy_(torch.where(patterns.isfinite(), patterns, 0)[torch.randperm(2**16)].view(2048, 32))
    kernel, x = CpuLinear(any_library), torch.eye(1024)[torch.arange(32) * 32 + torch.randint(0, 32, (32,))]
    assert torch.equal(kernel.run(x, kernel.prepare_coded(weight, None)), x @ weight.dequantized().float().T)


def test_columns_that_are_no_whole_groups_are_refused() -> None:
    weight = drawn(GroupCodes(4, 32), 16, 64)
    with pytest.raises(ValueError, match="36 columns do not fit groups of 32"):
        CpuLinear().prepare_coded(CodedWeight(weight.codes[:, :36], weight.scales, None, weight.format), None)
