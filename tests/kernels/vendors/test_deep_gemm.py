"""The DeepGEMM adapters with an emulator that refuses invalid calls as the library does, against float64.

Results must be within tight bounds of the products of the quantized numbers, and within a loose bound of the true
product.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.experts.batch import ExpertBatch, ExpertWeights
from moe_engine.kernels.experts.deep_gemm import DeepGemmExperts
from moe_engine.kernels.experts.flashinfer_trtllm import TrtllmExperts
from moe_engine.kernels.gate_form import GatedActivation
from moe_engine.kernels.linear.deep_gemm import DeepGemmLinear
from moe_engine.kernels.linear.deep_gemm_products import DeepGemm
from moe_engine.kernels.linear.protocol import LinearCapabilities
from moe_engine.kernels.quantization import reference as fp8
from moe_engine.kernels.quantization.protocol import (
    UNQUANTIZED,
    ActivationFormat,
    BlockFP8,
    BlockWeight,
    QuantizedActivation,
)
from moe_engine.kernels.vendors.warming import StepShapes, row_counts
from moe_engine.parallel.dispatch.protocol import DispatchShape
from moe_engine.parallel.experts import make_routed_experts
from tests.kernels.cpu.formulas import NAN, block_product, close, gated, normal, rms_norm, silu
from tests.kernels.triton.poison import poisoned_memory
from tests.kernels.vendors.contract import ContractBroken
from tests.kernels.vendors.deep_gemm_emulator import ALIGNMENT, DeepGemmEmulator

BF16 = torch.bfloat16
BUILDS = [(9, True), (9, False), (10, True)]
FP8_ERROR = 0.15  # of a whole result: two products of numbers with 3 bits of mantissa, of few rows
TWICE = 0.21  # the same, of weights that Blackwell quantizes again: 150 draws have up to 0.16


def library(arch: int = 9, takes_ends: bool = True) -> tuple[DeepGemmEmulator, DeepGemm]:
    emulator = DeepGemmEmulator(arch, takes_ends)
    return emulator, DeepGemm(emulator.module, (arch, 0), fp8)


def weight(n: int, k: int, power_of_two: bool = False) -> BlockWeight:
    """Blocks of very different magnitudes."""
    sizes = torch.rand(-(-n // 128), -(-k // 128)).mul(4).exp().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return fp8.quantize_weight(torch.randn(n, k) * sizes[:n, :k] / 50, power_of_two)


def as_used(w: BlockWeight, arch: int) -> BlockWeight:
    """The scales as used: Blackwell takes powers of two only."""
    return w if arch == 9 or w.power_of_two else fp8.quantize_weight(fp8.dequantize_weight(w), power_of_two=True)


def near(got: Tensor, want: Tensor, most: float = FP8_ERROR) -> None:
    error = (got.double() - want).norm() / want.norm().clamp_min(1e-9)
    assert error < most, f"relative error {error:.3f}"


@pytest.mark.parametrize("arch,takes_ends", BUILDS)
def test_dependent_launch_is_on_where_the_library_has_it(arch, takes_ends):
    assert library(arch, takes_ends)[0].pdl == takes_ends


def test_builds_that_trap_at_uninitialized_scales_are_refused():
    with pytest.raises(ImportError, match=r"deep_gemm takes no group ends: too old \(pip install"):
        library(10, takes_ends=False)


@pytest.mark.parametrize("arch", [9, 10])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_linear_equals_float64(arch, power_of_two):
    emulator, gemm = library(arch)
    kernel = DeepGemmLinear(gemm)
    own = {"norms": kernel.norms, "into": kernel.run_into}
    wanted = LinearCapabilities({BlockFP8: kernel.prepare_blocks}, kernel.warm_up, **own)
    assert kernel.capabilities == wanted
    for tokens, n, k in ((0, 64, 128), (1, 576, 256), (7, 192, 640), (130, 128, 384)):
        w, bias = weight(n, k, power_of_two), normal(n, dtype=BF16)
        prepared = kernel.prepare_blocks(w, bias)
        x = normal(tokens, 2 * k, dtype=BF16)[:, :k]  # strided rows
        got = kernel.run(x, prepared)
        assert got.shape == (tokens, n) and got.dtype == BF16 and got.is_contiguous()
        rows = fp8.quantize_rows(x, power_of_two or arch == 10)
        close(got, block_product(rows, as_used(w, arch)) + bias.double(), scale=2)
        if tokens:
            near(got, x.double() @ fp8.dequantize_weight(w).double().T + bias.double())
    assert emulator.transposed == emulator.packed == 0  # activations have the kernel's layout


@pytest.mark.parametrize("arch", [9, 10])
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_a_product_behind_a_norm_and_a_whole_mlp(arch, tokens):
    emulator, gemm = library(arch)
    kernel = DeepGemmLinear(gemm)
    gate_up, down = weight(384, 256), weight(128, 256)
    first = kernel.prepare_blocks(gate_up)
    x, norm = normal(tokens, 300, dtype=BF16)[:, :256], torch.rand(256) + 0.5
    assert kernel.input_format(first) == ActivationFormat.fp8(arch == 10, arch == 10)
    assert kernel.input_format(kernel.prepare(normal(4, 8, dtype=BF16))) == UNQUANTIZED
    values, plain = fp8.rms_norm_quantize(x, norm, 1e-5, None, arch == 10)
    normed = fp8.quantize_rows(values, arch == 10, exponents=arch == 10)
    want = block_product(plain, as_used(gate_up, arch))
    got = kernel.run(QuantizedActivation(normed, None, BF16), first)
    assert got.shape == (tokens, 384)
    inner = kernel.prepare_blocks(weight(512, 256)), kernel.prepare_blocks(down)
    assert kernel.fuse_mlp(first, kernel.prepare(normal(4, 8, dtype=BF16))) is None
    mlp = kernel.fuse_mlp(*inner, LIMIT)
    assert mlp is not None
    out = mlp(x)
    assert out.shape == (tokens, 128) and emulator.packed == 0
    if tokens:
        assert (got - want).abs().max() < 0.01 * want.abs().max()
        near(got, rms_norm(x, norm, 1e-5) @ fp8.dequantize_weight(gate_up).double().T)
        gate, up = kernel.run(x, inner[0]).chunk(2, 1)
        active = silu(gate.double().clamp(max=LIMIT)) * up.double().clamp(-LIMIT, LIMIT)
        rows = fp8.quantize_rows(active.float(), arch == 10)
        close(out, block_product(rows, as_used(down, arch)), scale=4)


@pytest.mark.parametrize("n,k", [(100, 128), (128, 192)])
def test_a_weight_the_library_does_not_serve_becomes_bf16(n, k):
    emulator, gemm = library()
    kernel, w = DeepGemmLinear(gemm), weight(n, k)
    x = normal(5, k, dtype=BF16)
    close(kernel.run(x, kernel.prepare_blocks(w)), x.double() @ fp8.dequantize_weight(w).to(BF16).double().T)
    assert not emulator.compiled


def test_bf16_weights_and_heads_go_to_torch():
    kernel = DeepGemmLinear(library()[1])
    w, x = normal(48, 40, dtype=BF16), normal(9, 40, dtype=BF16)
    close(kernel.run(x, kernel.prepare(w)), x.double() @ w.double().T)
    heads, y = normal(3, 16, 24, dtype=BF16), normal(9, 3, 24, dtype=BF16)
    close(kernel.run_heads(y, kernel.prepare_heads(heads)), torch.einsum("thk,hnk->thn", y.double(), heads.double()))


def test_linear_refuses_other_rows():
    kernel = DeepGemmLinear(library()[1])
    prepared = kernel.prepare_blocks(weight(64, 128))
    with pytest.raises(ValueError, match="do not fit"):
        kernel.run(torch.randn(3, 128), prepared)
    with pytest.raises(ValueError, match="do not fit"):
        kernel.run(normal(3, 256, dtype=BF16), prepared)


# experts

LIMIT = 1.5
"""Of clamped activations."""
Parts = list[tuple[BlockWeight, BlockWeight, BlockWeight]]


def fp8_experts(
    kernel: DeepGemmExperts | TrtllmExperts, num: int, hidden: int, width: int
) -> tuple[ExpertWeights, Parts]:
    weights = kernel.allocate_blocks(num, hidden, width, "cpu")
    parts = [(weight(width, hidden), weight(width, hidden), weight(hidden, width)) for _ in range(num)]
    for expert, part in enumerate(parts):
        kernel.load_expert_blocks(weights, expert, *part)
    return weights, parts


def quantized_mlp(arch: int, parts: Parts, limit: float = torch.inf) -> Callable[[Tensor, int], Tensor]:
    """The expert on quantized numbers in float64, with the rounding to bf16 and FP8 between the products."""

    def run(x: Tensor, expert: int) -> Tensor:
        gate, up, down = (as_used(part, arch) for part in parts[expert])
        rows = fp8.quantize_rows(x, arch == 10)
        middle = [block_product(rows, w).to(BF16).double() for w in (gate, up)]
        inner = silu(middle[0].clamp(max=limit)) * middle[1].clamp(-limit, limit)
        return block_product(fp8.quantize_rows(inner.float(), arch == 10), down)

    return run


def true_mlp(parts: Parts, limit: float = 0.0) -> Callable[[Tensor, int], Tensor]:
    return lambda x, expert: gated(x, *(fp8.dequantize_weight(part) for part in parts[expert]), GatedActivation(limit))


def grouped(counts: list[int], hidden: int, extra: int = 0) -> ExpertBatch:
    """`extra` rows have no expert and are NaN."""
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    x = normal(sum(counts) + extra, hidden, dtype=BF16)
    x[sum(counts) :] = NAN
    return ExpertBatch("grouped", x, offsets=offsets)


def check_grouped(kernel, weights, batch: ExpertBatch, *references: tuple[Callable, Callable]) -> Tensor:
    """Compares the rows of each expert; returns all rows."""
    got = kernel.run(batch, weights)
    assert got.shape == batch.x.shape
    offsets = batch.offsets.tolist()
    for expert, (start, stop) in enumerate(itertools.pairwise(offsets)):
        for mlp, compare in references:
            if stop > start:
                compare(got[start:stop], mlp(batch.x[start:stop], expert))
    return got


def fp8_close(got: Tensor, want: Tensor) -> None:
    """A different bf16 rounding may move an FP8 number by one step: rarely, and with a small effect in many rows. Of a
    row of 128 numbers, an eighth of one that is three times as large as others is 3 %."""
    error = (got.double() - want).norm() / want.norm().clamp_min(1e-9)
    most = 0.01 + 3 / 8 / (got.numel() / 2) ** 0.5  # `got` has up to twice as many columns as the rows between
    assert error < most, f"relative error {error:.4f}"


@pytest.mark.each_value
@pytest.mark.parametrize("arch,takes_ends", BUILDS)
@pytest.mark.parametrize(
    "counts,extra", [([3, 0, 41, 1], 0), ([0, 0, 300, 0], 0), ([5, 130, 0, 7], 90), ([600, 9, 200, 0], 0)]
)
def test_fp8_experts_grouped(arch, takes_ends, counts, extra):
    kernel = DeepGemmExperts(library(arch, takes_ends)[1])
    hidden, width = 256, 128
    weights, parts = fp8_experts(kernel, len(counts), hidden, width)
    batch = grouped(counts, hidden, extra)
    weights.activation = GatedActivation(LIMIT)
    with poisoned_memory():
        got = check_grouped(kernel, weights, batch, (quantized_mlp(arch, parts, LIMIT), fp8_close))
    rows, true = batch.x[: sum(counts)].split(counts), true_mlp(parts, LIMIT)
    want = torch.cat([true(x, expert) for expert, x in enumerate(rows)])  # of all rows: one row varies too much
    near(got[: sum(counts)], want, TWICE if arch == 10 else FP8_ERROR)


@pytest.mark.each_value
@pytest.mark.parametrize("arch", [9, 10])
@pytest.mark.parametrize("counts,capacity", [([3, 0, 8], 8), ([0, 0, 17], 17), ([1, 2, 30], 130)])
def test_fp8_experts_padded(arch, counts, capacity):
    emulator, gemm = library(arch)
    kernel = DeepGemmExperts(gemm)
    hidden, width = 128, 256
    weights, parts = fp8_experts(kernel, len(counts), hidden, width)
    weights.activation = GatedActivation(LIMIT)
    x = normal(len(counts), capacity, hidden, dtype=BF16)
    for expert, count in enumerate(counts):
        x[expert, count:] = NAN
    got = kernel.run(ExpertBatch("padded", x, counts=torch.tensor(counts)), weights)
    assert got.shape == x.shape
    rows = [x[expert, :count] for expert, count in enumerate(counts)]
    for expert, count in enumerate(counts):
        if count:
            fp8_close(got[expert, :count], quantized_mlp(arch, parts, LIMIT)(rows[expert], expert))
    found, true = [got[expert, :count] for expert, count in enumerate(counts)], true_mlp(parts, LIMIT)
    want = torch.cat([true(row, expert) for expert, row in enumerate(rows)])
    near(torch.cat(found), want, TWICE if arch == 10 else FP8_ERROR)
    assert arch == 10 or emulator.transposed == 0  # Hopper: scales have the layout of its kernels


@pytest.mark.parametrize("tokens", [1, 100, 128])
def test_a_padded_decode_expects_the_rows_of_the_step(tokens, monkeypatch):
    """V3 on 8 ranks: before, the rows that select the tiles were an eighth of the capacity, 128, at every step size."""
    _, gemm = library()
    kernel, ranks, top_k, all_experts = DeepGemmExperts(gemm), 8, 8, 256
    capacity = ranks * 128
    weights, _ = fp8_experts(kernel, 2, 128, 128)
    shape = DispatchShape(all_experts, ranks, top_k, 128, 128, BF16)
    asked = []
    monkeypatch.setattr(gemm, "masked", lambda a, b, out, counts, expected: asked.append(expected))
    x, counts = normal(2, capacity, 128, dtype=BF16), torch.tensor([3, 0]).int()
    kernel.run(ExpertBatch("padded", x, counts=counts, mean_rows=shape.mean_rows(tokens)), weights)
    assert asked == [{1: 1, 100: 32, 128: 32}[tokens]] * 2


def aligned(counts: list[int], hidden: int, alignment: int) -> tuple[ExpertBatch, list[slice]]:
    """Groups in DeepEP's expanded form; rows outside them are NaN."""
    ends, spans, start = [], [], 0
    for count in counts:
        spans.append(slice(start, start + count))
        ends.append(start + count)
        start = -(-ends[-1] // alignment) * alignment
    x = torch.full((start + 2 * alignment, hidden), NAN, dtype=BF16)
    for span, count in zip(spans, counts):
        x[span] = normal(count, hidden, dtype=BF16)
    return ExpertBatch("aligned", x, ends=torch.tensor(ends).int(), alignment=alignment), spans


def row_alignment(kernel: DeepGemmExperts, weights: ExpertWeights, mean_rows: int = 0) -> int:
    ask = kernel.capabilities.row_alignment
    assert ask is not None
    return ask(weights, mean_rows)


@pytest.mark.parametrize("arch,mean_rows,alignment", [(9, 0, ALIGNMENT), (9, 53, 64), (10, 53, ALIGNMENT)])
@pytest.mark.parametrize("counts", [[3, 0, 41, 1], [0, 300, 0], [63, 65, 64]])
def test_groups_with_ends_are_multiplied_where_they_are(arch, mean_rows, alignment, counts, monkeypatch):
    """No rows are copied to aligned positions and back. Groups of few rows are aligned to the smaller tile."""
    emulator, gemm = library(arch)
    kernel = DeepGemmExperts(gemm)
    weights, parts = fp8_experts(kernel, len(counts), 256, 128)
    assert row_alignment(kernel, weights, mean_rows) == alignment and row_alignment(kernel, weights, 54) == ALIGNMENT
    assert row_alignment(kernel, weights) == ALIGNMENT and kernel.capabilities.column_scales == (arch == 9)
    assert arch == 10 or row_alignment(DeepGemmExperts(library(9, takes_ends=False)[1]), weights) == 0
    batch, spans = aligned(counts, 256, alignment)
    monkeypatch.setattr(gemm, "spread", None)
    monkeypatch.setattr(gemm.permutation, "permute", None)
    rows = fp8.quantize_rows(batch.x.nan_to_num(), arch == 10)
    arrived = replace(batch, x=rows.data, scales=rows.scales, dtype=BF16)
    for got in (kernel.run(batch, weights), kernel.run(arrived, weights)):
        assert got.shape == batch.x.shape and got.dtype == BF16
        for expert, span in enumerate(spans):
            if counts[expert]:
                fp8_close(got[span], quantized_mlp(arch, parts)(batch.x[span], expert))
    assert arch == 10 or emulator.transposed == 0
    factors = torch.exp2(torch.randint(-3, 3, (len(batch.x),)).float())  # exact
    weighted = kernel.run(replace(arrived, row_weights=factors), weights)
    for span in spans:
        assert torch.equal(weighted[span], got[span] * factors[span, None].bfloat16())
    weights = kernel.allocate(len(counts), 64, 48, BF16, "cpu")
    plain = [[normal(*shape, dtype=BF16) for shape in ((48, 64), (48, 64), (64, 48))] for _ in counts]
    for expert, part in enumerate(plain):
        kernel.load_expert(weights, expert, *part)
    batch, spans = aligned(counts, 64, alignment)
    got, factors = kernel.run(batch, weights), torch.rand(len(batch.x)) + 0.1
    weighted = kernel.run(replace(batch, row_weights=factors), weights)
    for expert, span in enumerate(spans):
        if counts[expert]:
            want = gated(batch.x[span], *plain[expert])
            close(got[span], want, scale=3)
            close(weighted[span], want * factors[span, None], scale=3)
    assert emulator.alignment == ALIGNMENT  # as other products of the process expect


@pytest.mark.parametrize("takes_ends", [True, False])
def test_bf16_experts(takes_ends):
    kernel = DeepGemmExperts(library(9, takes_ends)[1])
    counts, hidden, width = [4, 0, 131, 20], 64, 48
    weights = kernel.allocate(len(counts), hidden, width, BF16, "cpu")
    parts = [
        (normal(width, hidden, dtype=BF16), normal(width, hidden, dtype=BF16), normal(hidden, width, dtype=BF16))
        for _ in counts
    ]
    for expert, part in enumerate(parts):
        kernel.load_expert(weights, expert, *part)
    weights.activation = GatedActivation(LIMIT)
    reference = lambda x, expert: gated(x, *parts[expert], GatedActivation(LIMIT))  # noqa: E731
    check_grouped(kernel, weights, grouped(counts, hidden, extra=3), (reference, lambda got, want: close(got, want, 3)))
    x = normal(len(counts), 150, hidden, dtype=BF16)
    got = kernel.run(ExpertBatch("padded", x, counts=torch.tensor(counts).int()), weights)
    for expert, count in enumerate(counts):
        if count:
            close(got[expert, :count], reference(x[expert, :count], expert), scale=3)


def choose(tokens: int, top_k: int, num_experts: int) -> Tensor:
    """Distinct experts, some of them on other ranks (larger ids, or -1)."""
    ids = torch.rand(tokens, num_experts + 2).argsort(1)[:, :top_k]
    return torch.where(ids == num_experts + 1, -1, ids).int()


def routed(x: Tensor, weights: Tensor, ids: Tensor, mlp: Callable[[Tensor, int], Tensor], num: int) -> Tensor:
    """sum_k w_k mlp(x, id_k) in float64."""
    out = torch.zeros(*x.shape, dtype=torch.float64)
    for token, choices in enumerate(ids.tolist()):
        for k, expert in enumerate(choices):
            if 0 <= expert < num:
                out[token] += weights[token, k].double() * mlp(x[token : token + 1], expert)[0].double()
    return out


@pytest.mark.each_value
@pytest.mark.parametrize("arch,takes_ends", BUILDS)
@pytest.mark.parametrize("tokens", [1, 21, 150])
def test_fp8_experts_of_tokens_that_stay(arch, takes_ends, tokens):
    """Unquantized inputs, and inputs quantized by the norm, give the same bits."""
    emulator, gemm = library(arch, takes_ends)
    kernel, num = DeepGemmExperts(gemm), 5
    weights, parts = fp8_experts(kernel, num, 256, 128)
    weights.activation = GatedActivation(LIMIT)
    x, ids, add = normal(tokens, 256, dtype=BF16), choose(tokens, 3, num), normal(tokens, 256, dtype=BF16)
    topk_weights = torch.rand(tokens, 3)
    with poisoned_memory():
        got = kernel.run_routed(x, topk_weights, ids, weights, add)
    assert got.shape == x.shape and got.dtype == BF16
    fp8_close(got, routed(x, topk_weights, ids, quantized_mlp(arch, parts, LIMIT), num) + add.double())
    assert kernel.input_format(weights) == gemm.expert_format(False) == ActivationFormat.fp8(arch == 10)
    before = QuantizedActivation(fp8.quantize_rows(x, arch == 10), None, BF16)
    assert torch.equal(kernel.run_routed(before, topk_weights, ids, weights, add), got)
    assert emulator.transposed == 0


def test_bf16_experts_of_tokens_that_stay():
    kernel, num = DeepGemmExperts(library()[1]), 4
    weights = kernel.allocate(num, 64, 48, BF16, "cpu")
    parts = [[normal(*shape, dtype=BF16) for shape in ((48, 64), (48, 64), (64, 48))] for _ in range(num)]
    for expert, part in enumerate(parts):
        kernel.load_expert(weights, expert, *part)
    assert kernel.input_format(weights) == UNQUANTIZED
    for tokens in (0, 1, 300):  # mostly gaps, and mostly rows
        x, ids, topk_weights = normal(tokens, 64, dtype=BF16), choose(tokens, 2, num), torch.rand(tokens, 2)
        got = kernel.run_routed(x, topk_weights, ids, weights)
        close(got, routed(x, topk_weights, ids, lambda row, expert: gated(row, *parts[expert]), num), scale=3)


@pytest.mark.parametrize("takes_ends", [True, False])
def test_nothing_of_a_step_depends_on_what_the_device_holds(takes_ends):
    """On a device without values every read of a value raises, as during the capture of a graph."""
    emulator = DeepGemmEmulator(9, takes_ends)
    silent = (lambda a, b, d, layout, use_psum_layout: None) if takes_ends else (lambda a, b, d, layout: None)
    emulator.module.m_grouped_fp8_gemm_nt_contiguous = silent
    emulator.module.m_grouped_bf16_gemm_nt_contiguous = silent  # one trial call for group ends
    kernel = DeepGemmExperts(DeepGemm(emulator.module, (9, 0), fp8))
    weights = kernel.allocate_blocks(6, 256, 128, "meta")
    routed_here = make_routed_experts(kernel, weights)
    x, ids = torch.empty(5, 256, dtype=BF16, device="meta"), torch.empty(5, 2, dtype=torch.int32, device="meta")
    assert routed_here.input_format.rows and routed_here.run(x, torch.empty(5, 2, device="meta"), ids).shape == (5, 256)


@pytest.mark.parametrize("arch", [9, 10])
@pytest.mark.parametrize("layout", ["grouped", "padded"])
def test_rows_that_travelled_in_fp8_are_not_quantized_again(arch, layout, monkeypatch):
    """Scales may have any strides, and those of rows beyond the counts any value; the results are those of the
    numbers."""
    _, gemm = library(arch)
    kernel, counts, capacity = DeepGemmExperts(gemm), [3, 0, 8, 1], 9
    weights, _ = fp8_experts(kernel, len(counts), 256, 128)
    shape = (sum(counts), 256) if layout == "grouped" else (len(counts), capacity, 256)
    x = normal(*shape, dtype=BF16)
    sizes = {"offsets": torch.tensor([0, *counts]).cumsum(0).int(), "counts": torch.tensor(counts).int()}
    sizes = {name: sizes[name] for name in (["offsets"] if layout == "grouped" else ["counts"])}
    rows = fp8.quantize_rows(x.flatten(0, -2), arch == 10)
    want = kernel.run(ExpertBatch(layout, x, **sizes), weights)
    if layout == "padded":
        rows.scales.unflatten(0, shape[:-1])[torch.arange(capacity) >= sizes["counts"][:, None]] = NAN
    passes = []
    monkeypatch.setattr(gemm, "quantized", lambda *args: passes.append(args))
    for scales in (rows.scales.contiguous(), rows.scales):
        batch = ExpertBatch(layout, rows.data.view(shape), **sizes, scales=scales.unflatten(0, shape[:-1]), dtype=BF16)
        got = kernel.run(batch, weights)
        assert got.dtype == BF16
        for expert, count in enumerate(counts):
            start = sum(counts[:expert])
            own = (expert, slice(count)) if layout == "padded" else slice(start, start + count)
            assert torch.equal(got[own], want[own])
    assert not passes


def test_experts_of_sizes_the_library_does_not_serve_are_kept_in_bf16():
    emulator, gemm = library()
    kernel = DeepGemmExperts(gemm)
    weights, parts = fp8_experts(kernel, 2, 128, 192)  # 192 is not a multiple of the block size
    check_grouped(kernel, weights, grouped([9, 4], 128), (true_mlp(parts), near))
    assert {key[0] for key in emulator.compiled} == {"bf16 contiguous"}


def test_no_rows():
    kernel = DeepGemmExperts(library()[1])
    weights, _ = fp8_experts(kernel, 2, 128, 128)
    assert kernel.run(grouped([0, 0], 128), weights).shape == (0, 128)


@pytest.mark.parametrize("arch", [9, 10])
def test_an_expert_moves_with_its_memory(arch):
    kernel = DeepGemmExperts(library(arch)[1])
    weights, parts = fp8_experts(kernel, 3, 128, 128)
    source, target = (kernel.expert_memory(weights, expert) for expert in (0, 2))
    for theirs, ours in zip(source, target):
        assert theirs.is_contiguous() and theirs.shape == ours.shape
        ours.view(torch.uint8).copy_(theirs.view(torch.uint8))
    parts[2] = parts[0]
    check_grouped(kernel, weights, grouped([2, 3, 5], 128), (quantized_mlp(arch, parts), fp8_close))


def test_nothing_compiles_after_warm_up():
    emulator, gemm = library()
    linear, experts = DeepGemmLinear(gemm), DeepGemmExperts(gemm)
    prepared = [linear.prepare_blocks(weight(n, k)) for n, k in ((192, 128), (256, 128))]
    weights, _ = fp8_experts(experts, 3, 128, 128)
    shapes = StepShapes(tokens=100, expert_rows=100, expert_capacity=24)
    runs = linear.warm_up(shapes) + experts.warm_up(shapes)
    assert runs == 2 * len(row_counts(100)) + 2 * len(row_counts(100)) + 2 * len({1, 2, 4, 8, 16, 24})
    assert len(emulator.compiled) > 6  # tiles depend on the rows
    emulator.sealed = True
    for tokens in torch.randint(1, 101, (8,)).tolist():
        for w in prepared:
            linear.run(normal(tokens, w.in_features, dtype=BF16), w)
        experts.run(grouped([tokens - 1, 0, 1], 128), weights)
    for mean in range(30):
        x, counts = normal(3, 24, 128, dtype=BF16), torch.tensor([1, 24, 0])
        experts.run(ExpertBatch("padded", x, counts=counts, mean_rows=mean), weights)
    with pytest.raises(ContractBroken, match="compiles after READY"):
        linear.run(normal(2, 128, dtype=BF16), linear.prepare_blocks(weight(64, 128)))


def test_row_counts_leave_no_gap():
    counts = row_counts(9000)
    assert counts[0] == 1 and counts[-1] == 9000
    assert all(b - a <= max(16, a // 8) for a, b in itertools.pairwise(counts))
    assert row_counts(0) == [] and row_counts(1) == [1]


# the emulator refuses wrong calls


def good_dense(arch: int = 9) -> dict:
    emulator, gemm = library(arch)
    a = gemm.rows(normal(40, 1024, dtype=BF16), False)
    b = gemm.weight(weight(128, 1024))
    return {"call": emulator.module.fp8_gemm_nt, "a": a, "b": b, "d": torch.empty(40, 128, dtype=BF16)}


def column_major(x: Tensor) -> Tensor:
    return x.view(torch.uint8).t().contiguous().t().view(x.dtype)


DENSE_BREACHES = {
    "K differs": lambda c: c.update(a=(c["a"][0][:, :128].contiguous(), c["a"][1])),
    "bf16 operand": lambda c: c.update(a=(c["a"][0].to(BF16), c["a"][1])),
    "rows not contiguous": lambda c: c.update(b=(column_major(c["b"][0]), c["b"][1])),
    "scales of other rows": lambda c: c.update(a=(c["a"][0], c["a"][1][:39])),
    "float32 output": lambda c: c.update(d=c["d"].float()),
    "output of other shape": lambda c: c.update(d=torch.empty(40, 64, dtype=BF16)),
    "unaligned rows": lambda c: c.update(d=torch.empty(40, 129, dtype=BF16)[:, :128]),
    "strided weight scales": lambda c: c.update(
        b=(torch.cat([c["b"][0]] * 2), torch.ones(4, 16)[::2, ::2]), d=torch.empty(40, 256, dtype=BF16)
    ),
}  # fmt: skip


@pytest.mark.parametrize("breach", DENSE_BREACHES)
def test_the_emulator_refuses_wrong_dense_calls(breach):
    case = good_dense()
    case["call"](case["a"], case["b"], case["d"])
    DENSE_BREACHES[breach](case)
    with pytest.raises(ContractBroken):
        case["call"](case["a"], case["b"], case["d"])


def test_blackwell_refuses_scales_that_are_no_powers_of_two():
    case = good_dense(10)
    case["call"](case["a"], case["b"], case["d"])
    with pytest.raises(ContractBroken, match="a mantissa"):
        case["call"]((case["a"][0], case["a"][1] * 1.5), case["b"], case["d"])
    with pytest.raises(ContractBroken, match="MN-major"):
        case["call"](case["a"], (case["b"][0], case["b"][1].contiguous()), case["d"])


def test_the_emulator_refuses_wrong_groups():
    emulator, gemm = library()
    kernel = DeepGemmExperts(gemm)
    weights, _ = fp8_experts(kernel, 2, 128, 128)
    call, masked = emulator.module.m_grouped_fp8_gemm_nt_contiguous, emulator.module.m_grouped_fp8_gemm_nt_masked
    a, b = gemm.rows(normal(256, 128, dtype=BF16), False), weights.data.down.operand
    out = torch.empty(256, 128, dtype=BF16)
    call(a, b, out, torch.tensor([10, 200]).int(), use_psum_layout=True)
    assert out[:10].isfinite().all() and out[10:ALIGNMENT].isnan().all() and out[ALIGNMENT:200].isfinite().all()
    for ends in ([10, 20], [10, 257], [200, 130]):
        with pytest.raises(ContractBroken):
            call(a, b, out, torch.tensor(ends).int(), use_psum_layout=True)
    rows = torch.cat((torch.full((100,), 0), torch.full((28,), -1), torch.full((128,), 1)))
    call(a, b, out, rows.int())
    for wrong in (rows.long(), rows.roll(1).int(), rows[:255].int(), rows.clamp_min(0).sort().values.roll(-30).int()):
        with pytest.raises(ContractBroken):
            call(a, b, out, wrong)
    three = (a[0].view(2, 128, 128), a[1].unflatten(0, (2, 128)))
    padded = torch.empty(2, 128, 128, dtype=BF16)
    masked(three, b, padded, torch.tensor([5, 0]).int(), 3)
    assert padded[0, :5].isfinite().all() and padded[0, 5:].isnan().all() and padded[1].isnan().all()
    for counts, expected in (
        (torch.tensor([5, 0]), 3),
        (torch.tensor([5, 129]).int(), 3),
        (torch.tensor([5, 0]).int(), 0),
    ):
        with pytest.raises(ContractBroken):
            masked(three, b, padded, counts, expected)
