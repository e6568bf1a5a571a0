"""Routed experts in Triton whose weights stay in 4 bits, against float64 products with the values by definition."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.experts.batch import ExpertBatch, ExpertBiases
from moe_engine.kernels.experts.triton_experts import TritonExperts
from moe_engine.kernels.gate_form import SQUARED, GatedActivation
from moe_engine.kernels.linear import triton_four_bits
from moe_engine.kernels.quantization.codes import FP4, MXFP4_GROUP, NVFP4_GROUP, STEP, CodedWeight, GroupCodes
from moe_engine.kernels.weight_forms import FOUR_BITS, FP8_BLOCKS
from moe_engine.models.formats.fused_experts import FusedExpertsFormat
from moe_engine.models.formats.plain import PLAIN
from tests.kernels.cpu.formulas import NAN, biased, gated
from tests.kernels.drawn import coded_weight

MXFP4 = GroupCodes(4, MXFP4_GROUP, values=FP4)
FORMS = {
    "mxfp4": MXFP4,
    "nvfp4": GroupCodes(4, NVFP4_GROUP, values=FP4),
    "int4, 32": GroupCodes(4, 32),
    "int4, 32, zeros": GroupCodes(4, 32, zeros=True),
    "int4, 64, fp32": GroupCodes(4, 64, scales="float32"),
    "int4, 128, fp16": GroupCodes(4, 128, scales="float16"),
    "int4, 128, zeros, fp16": GroupCodes(4, 128, zeros=True, scales="float16"),
    "int4, 256, zeros": GroupCodes(4, 256, zeros=True),
}
BOUND = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 4e-2}  # of the largest result
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
kernel = TritonExperts()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN in poisoned rows


def sizes_of(form: GroupCodes) -> tuple[int, int]:
    """Hidden size and width: whole groups, but rarely whole steps of 128 columns."""
    unit = max(32, form.group)
    return tuple(unit * random.randint(1, max(1, most // unit)) for most in (288, 160))  # type: ignore[return-value]


def coded(form: GroupCodes, n: int, k: int) -> tuple[CodedWeight, Tensor]:
    """`coded_weight` and its values in float64."""
    weight = coded_weight(form, n, k)
    scales = weight.scales.double()
    if weight.whole is not None:  # times e4m3
        stored = (weight.scales.float() / weight.whole[:, None]).to(torch.float8_e4m3fn)
        scales = stored.double() * weight.whole[:, None].double()
    return weight, values_of(form, weight.codes, scales, weight.zeros)


def values_of(form: GroupCodes, codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    numbers = E2M1[codes.long()] if form.values == FP4 else codes.double()
    if form.values != FP4:
        numbers -= 8.0 if zeros is None else zeros.double().repeat_interleave(form.group, 1)
    return numbers * scales.double().repeat_interleave(form.group, 1)


class Experts:
    def __init__(self, count: int, dtype: torch.dtype, form: GroupCodes = MXFP4, squared: bool = False) -> None:
        self.dtype, (self.hidden, self.width) = dtype, sizes_of(form)
        first = self.width // 2 if squared else self.width
        self.weights = kernel.allocate_codes(count, self.hidden, self.width, "cpu", form, squared)
        self.parts: list[list[Tensor]] = []
        for expert in range(count):
            shapes = (first, self.hidden), (first, self.hidden), (self.hidden, self.width)
            parts = [coded(form, *shape) for shape in shapes]
            kernel.load_codes(self.weights, expert, *(weight for weight, _ in parts))
            self.parts.append([values for _, values in parts])

    def rows(self, *shape: int) -> Tensor:
        return torch.randn(*shape, self.hidden).to(self.dtype)

    def check(self, got: Tensor, want: Tensor) -> None:
        assert got.dtype == self.dtype and got.shape == want.shape and got.isfinite().all()
        worst = float((got.double() - want).abs().max() / want.abs().max())
        assert worst < BOUND[self.dtype], worst


@pytest.mark.drawn(9)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("tokens", [3, 60])
@pytest.mark.parametrize("form", FORMS)
def test_routed_and_padded_rows(form: str, dtype: torch.dtype, tokens: int) -> None:
    """Biased experts: pairs of few tokens, sorted rows of more, and a dispatcher's batch."""
    experts = Experts(3, dtype, FORMS[form])
    bias = ExpertBiases(torch.randn(3, 2 * experts.width), torch.randn(3, experts.hidden), 1.702, 0.9)
    experts.weights.bias = bias
    x = experts.rows(tokens)
    ids = torch.rand(tokens, 4).argsort(1)[:, :2].int() - 1  # -1: on another rank
    topk = torch.rand(tokens, 2)
    each = torch.stack([biased(x, *parts, bias, e) for e, parts in enumerate(experts.parts)])
    chosen = each[ids.clamp(min=0), torch.arange(tokens)[:, None]] * (ids >= 0)[..., None]  # [T, K, D]
    experts.check(kernel.run_routed(x, topk, ids, experts.weights), (chosen * topk[..., None]).sum(1))
    counts = torch.tensor([tokens, 0, 2], dtype=torch.int32)
    padded = experts.rows(3, tokens)
    padded[2, 2:] = NAN
    got = kernel.run(ExpertBatch("padded", padded, counts=counts), experts.weights)
    for expert, count in ((0, tokens), (2, 2)):
        rows = padded[expert, :count]
        experts.check(got[expert, :count], biased(rows, *experts.parts[expert], bias, expert))


@pytest.mark.drawn(6)
@pytest.mark.parametrize("tokens", [3, 60])
@pytest.mark.parametrize("form", FORMS)
def test_without_a_gate(form: str, tokens: int) -> None:
    """The halves of up in the places of gate and up: pairs of few tokens, sorted rows of more."""
    experts = Experts(3, torch.bfloat16, FORMS[form], squared=True)
    experts.weights.activation = SQUARED
    x, topk = experts.rows(tokens), torch.rand(tokens, 2)
    ids = torch.rand(tokens, 3).argsort(1)[:, :2].int()
    each = torch.stack([gated(x, *parts, SQUARED) for parts in experts.parts])
    chosen = each[ids, torch.arange(tokens)[:, None]]  # [T, K, D]
    experts.check(kernel.run_routed(x, topk, ids, experts.weights), (chosen * topk[..., None]).sum(1))


@pytest.mark.drawn(9)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [[0, 20, 1], [130, 0, 70]], ids=str)
def test_a_dispatchers_rows(rows: list[int], form: str) -> None:
    experts = Experts(3, torch.bfloat16, FORMS[form])
    experts.weights.activation = activation = random.choice((GatedActivation(0.8), GatedActivation(0.8, beta=1.5)))
    x, offsets = experts.rows(sum(rows)), torch.tensor([0, *rows]).cumsum(0).int()
    got = kernel.run(ExpertBatch("grouped", x, offsets=offsets), experts.weights)
    want = [gated(part, *experts.parts[e], activation) for e, part in enumerate(x.split(rows)) if len(part)]
    experts.check(got, torch.cat(want))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_number_is_rounded_at_most_once(form: str, dtype: torch.dtype) -> None:
    """Down projections of unit rows: gate and up of 0 with biases give an inner row of one 1. FP4 is exact, also at
    the ends of the range of its scales."""
    codes_of = FORMS[form]
    hidden, width = (-(-columns // codes_of.group) * codes_of.group for columns in (160, 96))
    weights = kernel.allocate_codes(1, hidden, width, "cpu", codes_of)
    down, values = coded(codes_of, hidden, width)
    if codes_of.mxfp4 and dtype != torch.float16:
        exponents = torch.arange(down.scales.numel()).remainder(200).sub(120).float().view_as(down.scales)
        down.scales.copy_(torch.exp2(exponents))  # 2^-120 to 2^79
        values = values_of(codes_of, down.codes, down.scales)
    if codes_of.nvfp4:
        stored = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)  # from 2^-9 to 448
        scales = stored[torch.randint(len(stored), down.scales.shape)]
        down = replace(down, whole=torch.full((hidden,), 1.5 / 256))
        down.scales.copy_(scales.double() * (1.5 / 256))
        values = values_of(codes_of, down.codes, scales.double() * (1.5 / 256))
    nothing, _ = coded(codes_of, width, hidden)
    nothing.codes.fill_(0 if codes_of.values == FP4 or codes_of.zeros else 8)
    if nothing.zeros is not None:
        nothing.zeros.zero_()
    kernel.load_codes(weights, 0, nothing, nothing, down)
    for column in torch.randperm(width)[:4].tolist():
        both = torch.zeros(1, 2 * width)
        both[0, column] = 64.0  # times sigmoid(64) is 64
        weights.bias = ExpertBiases(both, torch.zeros(1, hidden), 1.0, 64.0)  # up is 0: (0 + 1) * 64
        x = torch.ones(1, hidden, dtype=dtype)
        got = kernel.run_routed(x, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32), weights)
        assert torch.equal(got[0].double() / 64, values[:, column].to(dtype).double())


@pytest.mark.drawn(9)
@pytest.mark.parametrize("form", FORMS)
def test_memory_and_moving(form: str) -> None:
    experts = Experts(3, torch.float32, FORMS[form])
    format, hidden, width = FORMS[form], experts.hidden, experts.width
    steps = 2 * width * -(-hidden // STEP) + hidden * -(-width // STEP)  # scales of whole steps of 128 columns
    whole = 12 if format.nvfp4 else 0
    a_step = STEP * (format.bytes_on_gpu() - 0.5)
    assert experts.weights.num_bytes == 3 * (3 * hidden * width // 2 + a_step * steps + whole)
    for target, source in zip(kernel.expert_memory(experts.weights, 0), kernel.expert_memory(experts.weights, 2)):
        assert target.is_contiguous()
        target.copy_(source)
    x, offsets = experts.rows(4), torch.tensor([0, 4, 4, 4], dtype=torch.int32)
    experts.check(kernel.run(ExpertBatch("grouped", x, offsets=offsets), experts.weights), gated(x, *experts.parts[2]))


def test_declared_forms() -> None:
    declared = kernel.capabilities.quantized[GroupCodes].takes
    assert declared is not None and all(map(declared, FORMS.values()))
    others = GroupCodes(4, 0), GroupCodes(4, 16), GroupCodes(8, 32), GroupCodes(4, 64, values=FP4)
    assert not any(map(declared, (*others, GroupCodes(4, 32, factors=8))))


def test_the_ledger_counts_a_byte_for_a_scale() -> None:
    """Of gpt-oss-20b's experts."""
    parts = [part for n in (2 * 2880, 2880) for part in triton_four_bits.empty(MXFP4, 32, n, 2880, "meta")]
    kept = FusedExpertsFormat(32, "mxfp4").held_by({"experts": frozenset((FOUR_BITS,))})
    each = kept.bytes_per_element("model.layers.0.mlp.experts.*.up_proj", (2880, 2880), 2)
    assert sum(part.nbytes for part in parts) == pytest.approx(float(32 * 3 * 2880**2 * each), rel=2e-3)
    assert FusedExpertsFormat(32, "mxfp4").held_by({"experts": frozenset((FP8_BLOCKS,))}) == PLAIN
