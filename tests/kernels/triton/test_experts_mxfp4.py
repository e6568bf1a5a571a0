"""Routed experts in Triton whose weights stay in MXFP4, against float64 products with the values by definition."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.experts import triton_mxfp4
from moe_engine.kernels.experts.batch import ExpertBatch, ExpertBiases
from moe_engine.kernels.experts.triton_experts import TritonExperts
from moe_engine.kernels.quantization.codes import FP4, MXFP4_GROUP, CodedWeight, GroupCodes
from moe_engine.models.formats.fused_experts import FusedExpertsFormat
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.formats.table import kept_format
from tests.kernels.cpu.formulas import NAN, biased, gated
from tests.kernels.triton.poison import poisoned_memory

FORM = GroupCodes(4, MXFP4_GROUP, values=FP4)
HIDDEN, WIDTH = 160, 96  # neither is a multiple of a step of 128 columns
BOUND = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 4e-2}  # of the largest result
kernel = TritonExperts()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN in poisoned rows


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned_memory():
        yield


def coded(n: int, k: int) -> CodedWeight:
    """Random codes, all of them, with scales of several powers of two."""
    codes = torch.randint(16, (n, k), dtype=torch.uint8)
    scales = torch.exp2(torch.randint(-7, -2, (n, k // MXFP4_GROUP)).float())
    return CodedWeight(codes, scales.bfloat16(), None, FORM)


class Experts:
    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.weights = kernel.allocate_mxfp4(count, HIDDEN, WIDTH, "cpu", FORM)
        self.parts: list[list[Tensor]] = []
        for expert in range(count):
            parts = [coded(*shape) for shape in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))]
            kernel.load_mxfp4(self.weights, expert, *parts)
            self.parts.append([part.dequantized() for part in parts])

    def check(self, got: Tensor, want: Tensor) -> None:
        assert got.dtype == self.dtype and got.shape == want.shape and got.isfinite().all()
        worst = float((got.double() - want).abs().max() / want.abs().max())
        assert worst < BOUND[self.dtype], worst


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("tokens", [3, 60])
def test_biased_experts(dtype: torch.dtype, tokens: int) -> None:
    """Pairs of few tokens, sorted rows of more, and a dispatcher's batch."""
    experts = Experts(3, dtype)
    bias = ExpertBiases(torch.randn(3, 2 * WIDTH), torch.randn(3, HIDDEN), 1.702, 0.9)
    experts.weights.bias = bias
    x = torch.randn(tokens, HIDDEN).to(dtype)
    ids = torch.rand(tokens, 4).argsort(1)[:, :2].int() - 1  # -1: on another rank
    topk = torch.rand(tokens, 2)
    each = torch.stack([biased(x, *parts, bias, e) for e, parts in enumerate(experts.parts)])
    chosen = each[ids.clamp(min=0), torch.arange(tokens)[:, None]] * (ids >= 0)[..., None]  # [T, K, D]
    experts.check(kernel.run_routed(x, topk, ids, experts.weights), (chosen * topk[..., None]).sum(1))
    counts = torch.tensor([tokens, 0, 2], dtype=torch.int32)
    padded = torch.randn(3, tokens, HIDDEN).to(dtype)
    padded[2, 2:] = NAN
    got = kernel.run(ExpertBatch("padded", padded, counts=counts), experts.weights)
    for expert, count in ((0, tokens), (2, 2)):
        rows = padded[expert, :count]
        experts.check(got[expert, :count], biased(rows, *experts.parts[expert], bias, expert))


@pytest.mark.parametrize("rows", [[0, 20, 1], [130, 0, 70]], ids=str)
def test_a_dispatchers_rows(rows: list[int]) -> None:
    experts = Experts(3, torch.bfloat16)
    x, offsets = torch.randn(sum(rows), HIDDEN).bfloat16(), torch.tensor([0, *rows]).cumsum(0).int()
    got = kernel.run(ExpertBatch("grouped", x, offsets=offsets), experts.weights)
    want = [gated(part, *experts.parts[e]) for e, part in enumerate(x.split(rows)) if len(part)]
    experts.check(got, torch.cat(want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_code_and_scale_is_exact(dtype: torch.dtype) -> None:
    """Down projections of unit rows: gate and up of 0 with biases give an inner row of one 1."""
    weights = kernel.allocate_mxfp4(1, HIDDEN, WIDTH, "cpu", FORM)
    codes = torch.arange(HIDDEN * WIDTH, dtype=torch.int64).remainder(16).to(torch.uint8).view(HIDDEN, WIDTH)
    exponents = torch.arange(HIDDEN * 3).remainder(200).sub(120).float()  # 2^-120 to 2^79
    down = CodedWeight(codes, torch.exp2(exponents).bfloat16().view(HIDDEN, 3), None, FORM)
    nothing = CodedWeight(torch.zeros(WIDTH, HIDDEN, dtype=torch.uint8), coded(WIDTH, HIDDEN).scales, None, FORM)
    kernel.load_mxfp4(weights, 0, nothing, nothing, down)
    for column in torch.randperm(WIDTH)[:4].tolist():
        both = torch.zeros(1, 2 * WIDTH)
        both[0, column] = 64.0  # times sigmoid(64) is 64
        weights.bias = ExpertBiases(both, torch.zeros(1, HIDDEN), 1.0, 64.0)  # up is 0: (0 + 1) * 64
        x = torch.ones(1, HIDDEN, dtype=dtype)
        got = kernel.run_routed(x, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32), weights)
        assert torch.equal(got[0].float() / 64, down.dequantized()[:, column])


def test_memory_and_moving() -> None:
    experts = Experts(3, torch.float32)
    codes, scales = 3 * HIDDEN * WIDTH // 2, 4 * (2 * 2 * WIDTH + 1 * HIDDEN)  # scales of whole steps of 128
    assert experts.weights.num_bytes == 3 * (codes + scales)
    for target, source in zip(kernel.expert_memory(experts.weights, 0), kernel.expert_memory(experts.weights, 2)):
        assert target.is_contiguous()
        target.copy_(source)
    x, offsets = torch.randn(4, HIDDEN), torch.tensor([0, 4, 4, 4], dtype=torch.int32)
    experts.check(kernel.run(ExpertBatch("grouped", x, offsets=offsets), experts.weights), gated(x, *experts.parts[2]))
    declared = kernel.capabilities.quantized[GroupCodes].takes
    assert declared is not None and declared(FORM)
    assert not any(map(declared, (GroupCodes(4, 32), GroupCodes(8, 32), GroupCodes(4, 16, values=FP4))))


def test_the_ledger_counts_a_byte_for_a_scale() -> None:
    """Of gpt-oss-20b's experts."""
    parts = [*triton_mxfp4.empty(32, 2 * 2880, 2880, "meta"), *triton_mxfp4.empty(32, 2880, 2880, "meta")]
    kept = kept_format(FusedExpertsFormat(32, "mxfp4"), "cuda", mxfp4=frozenset(("experts",)))
    each = kept.bytes_per_element("model.layers.0.mlp.experts.*.up_proj", (2880, 2880), 2)
    assert sum(part.nbytes for part in parts) == pytest.approx(float(32 * 3 * 2880**2 * each), rel=2e-3)
    assert kept_format(FusedExpertsFormat(32, "mxfp4"), "cuda") == PLAIN
