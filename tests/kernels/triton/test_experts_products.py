"""Routed experts in Triton, bf16, fp32 and FP8, in both layouts, against plain loops in float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.experts import triton_grouped_gemm
from moe_engine.kernels.experts.batch import ExpertBatch, ExpertBiases, ExpertWeights
from moe_engine.kernels.experts.group_tiles import num_programs, programs_per_sm
from moe_engine.kernels.experts.shapes import DEEPSEEK_V3, ExpertShape, named_shapes
from moe_engine.kernels.experts.tiles import BLOCK_FP8, PLAIN, WIDE
from moe_engine.kernels.experts.triton_experts import TritonExperts
from moe_engine.kernels.gate_form import GELU, SQUARED, GatedActivation
from moe_engine.kernels.quantization import reference
from moe_engine.kernels.quantization.protocol import BlockFP8, BlockWeight, RowWeight
from tests.kernels.cpu.formulas import NAN, activated, biased, block_product, by_row, gated

BOUNDED = (
    GatedActivation(0.6), GatedActivation(-0.3), GatedActivation(0.8, beta=0.6), GatedActivation(beta=0.9), GELU,
)  # fmt: skip
KINDS = ["fp32", "bf16", "fp8", "fp8_ue8m0", "fp8_rows"]
# of the largest result: sums in float32; a bf16 inner value and result; rounding ties of the inner FP8 cast
BOUND = {"fp32": 3e-6, "bf16": 1.5e-2, "fp8": 1e-2, "fp8_ue8m0": 1e-2, "fp8_rows": 1e-2}
kernel = TritonExperts()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN in poisoned rows


class Experts:
    """Random experts of a kind, in the kernel's memory and as plain values."""

    def __init__(self, kind: str, count: int, hidden: int, width: int, squared: bool = False) -> None:
        self.kind, self.power_of_two = kind, kind == "fp8_ue8m0"
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(kind, torch.float32)
        shapes = ((width, hidden), (width, hidden), (hidden, width))
        self.parts: list[list[Tensor] | list[BlockWeight] | list[RowWeight]] = []
        if kind == "fp8_rows":
            self.weights = kernel.allocate_rows(count, hidden, width, "cpu")
        elif kind.startswith("fp8"):
            self.weights = kernel.allocate_blocks(count, hidden, width, "cpu", BlockFP8(self.power_of_two))
        else:
            self.weights = kernel.allocate(count, hidden, width, self.dtype, "cpu", squared)
            if squared:
                self.weights.activation, shapes = SQUARED, ((width // 2, hidden),) * 2 + ((hidden, width),)
        for expert in range(count):
            plain = [torch.randn(n, k) * k**-0.5 * 2.0 ** float(torch.randint(-1, 2, ())) for n, k in shapes]
            if kind == "fp8_rows":
                stored = [by_row(part) for part in plain]
                kernel.load_expert_rows(self.weights, expert, *stored)
                self.parts.append(stored)
            elif kind.startswith("fp8"):
                blocks = [reference.quantize_weight(part, self.power_of_two) for part in plain]
                kernel.load_expert_blocks(self.weights, expert, *blocks)
                self.parts.append(blocks)
            else:
                cast = [part.to(self.dtype) for part in plain]
                kernel.load_expert(self.weights, expert, *cast)
                self.parts.append(cast)

    def rows(self, *shape: int) -> Tensor:
        return torch.randn(*shape).to(self.dtype)

    def clamp(self) -> None:
        """Another form of activations from now on."""
        self.weights.activation = random.choice(BOUNDED)

    def apply(self, x: Tensor, expert: int) -> Tensor:
        """x [M, D] through one expert in float64, quantized as in the kernel's contract."""
        parts = self.parts[expert]
        if not self.kind.startswith("fp8"):
            return gated(x, *parts, self.weights.activation)
        quantized = reference.quantize_rows(x, self.power_of_two)
        gate, up = (block_product(quantized, part) for part in parts[:2])
        inner = activated(gate, up, self.weights.activation)
        inner = reference.quantize_rows(inner.float(), self.power_of_two)
        return block_product(inner, parts[2])

    def check(self, got: Tensor, want: Tensor) -> None:
        assert got.dtype == self.dtype and got.shape == want.shape and got.isfinite().all()
        worst = float((got.double() - want).abs().max() / want.abs().max())
        assert worst < BOUND[self.kind], worst


# zero-token experts first, in the middle and last; one expert with everything; sizes around the tiles
COUNTS = ([0, 3, 0, 20, 1, 0], [0, 0, 37], [5], [1, 1, 1, 1], [40, 0, 70], [130, 2], [230, 0])


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_grouped(kind: str, counts: list[int]) -> None:
    experts = Experts(kind, len(counts), 160, 144)
    x = experts.rows(sum(counts) + 5, 160)  # a dispatcher's buffer may be longer than its rows
    x[sum(counts) :] = NAN
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    got = kernel.run(ExpertBatch("grouped", x, offsets=offsets), experts.weights)
    assert got.shape == x.shape
    want = [experts.apply(part, e) for e, part in enumerate(x[: sum(counts)].split(counts)) if len(part)]
    experts.check(got[: sum(counts)], torch.cat(want))


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [3, 60])
def test_biases(kind: str, tokens: int) -> None:
    """Pairs of few tokens, sorted rows of more, and a dispatcher's batch."""
    experts = Experts(kind, 4, 160, 72)
    experts.weights.bias = bias = ExpertBiases(torch.randn(4, 144), torch.randn(4, 160), 1.702, 0.9)
    x = experts.rows(tokens, 160)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)]).int()
    topk = torch.rand(tokens, 2)
    each = [biased(x, *experts.parts[e], bias, e) for e in range(4)]
    want = torch.stack([sum(topk[t, k] * each[ids[t, k]][t] for k in range(2)) for t in range(tokens)])
    experts.check(kernel.run_routed(x, topk, ids, experts.weights), want)
    counts = torch.tensor([tokens, 0, 1, 2], dtype=torch.int32)
    padded = experts.rows(4, tokens, 160)
    got = kernel.run(ExpertBatch("padded", padded, counts=counts), experts.weights)
    for expert, count in enumerate(counts.tolist()):
        if count:
            rows = padded[expert, :count]
            experts.check(got[expert, :count], biased(rows, *experts.parts[expert], bias, expert))
    experts.weights.bias, experts.weights.activation = None, GatedActivation(bias.limit, bias.alpha)
    alone = kernel.run_routed(x, topk, ids, experts.weights)
    experts.weights.bias = ExpertBiases(torch.zeros(4, 144), torch.zeros(4, 160), bias.alpha, bias.limit)
    assert torch.equal(alone, kernel.run_routed(x, topk, ids, experts.weights)), "no biases are biases of 0"


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [3, 60])
def test_without_a_gate(kind: str, tokens: int) -> None:
    """Pairs of few tokens, sorted rows of more, and a dispatcher's batch."""
    experts = Experts(kind, 4, 160, 2 * 72, squared=True)
    x, topk = experts.rows(tokens, 160), torch.rand(tokens, 2)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)]).int()
    each = [experts.apply(x, e) for e in range(4)]
    want = torch.stack([sum(topk[t, k] * each[ids[t, k]][t] for k in range(2)) for t in range(tokens)])
    experts.check(kernel.run_routed(x, topk, ids, experts.weights), want)
    counts = [tokens, 0, 1, 2]
    rows = experts.rows(sum(counts), 160)
    got = kernel.run(ExpertBatch("grouped", rows, offsets=torch.tensor([0, *counts]).cumsum(0).int()), experts.weights)
    experts.check(got, torch.cat([experts.apply(part, e) for e, part in enumerate(rows.split(counts))]))


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("counts", "capacity"), [([0, 3, 0, 20, 1], 20), ([7, 0, 41], 50), ([0, 0], 4)])
def test_padded(kind: str, counts: list[int], capacity: int) -> None:
    experts = Experts(kind, len(counts), 128, 72)
    experts.clamp()
    x = experts.rows(len(counts), capacity, 128)
    for expert, count in enumerate(counts):
        x[expert, count:] = NAN
    got = kernel.run(ExpertBatch("padded", x, counts=torch.tensor(counts, dtype=torch.int32)), experts.weights)
    assert got.shape == x.shape
    for expert, count in enumerate(counts):
        if count:
            experts.check(got[expert, :count], experts.apply(x[expert, :count], expert))


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "top_k", "count"), [(1, 2, 4), (9, 3, 5), (40, 2, 3)])
def test_routed(kind: str, tokens: int, top_k: int, count: int) -> None:
    experts = Experts(kind, count, 200, 64)
    if top_k == 3:
        experts.clamp()
    x, add = experts.rows(tokens, 216)[:, 8:-8], experts.rows(tokens, 200)
    ids = torch.rand(tokens, count + 2).argsort(1)[:, :top_k].int() - 1  # -1 and count: on another rank
    weights = torch.rand(tokens, top_k)
    want = add.double()
    for token in range(tokens):
        for expert, weight in zip(ids[token].tolist(), weights[token].double()):
            if 0 <= expert < count:
                want[token] += weight * experts.apply(x[token : token + 1], expert)[0]
    experts.check(kernel.run_routed(x, weights, ids, experts.weights, add), want)
    if want.sub(add.double()).any():
        experts.check(kernel.run_routed(x, weights, ids, experts.weights), want - add.double())


def test_a_token_does_not_depend_on_the_others() -> None:
    experts = Experts("fp8", 4, 128, 128)
    x, weights = experts.rows(12, 128), torch.rand(12, 2)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(12)]).int()
    x[3, 70] = NAN
    got = kernel.run_routed(x, weights, ids, experts.weights)
    others = torch.arange(12) != 3
    assert got[3].isnan().all() and got[others].isfinite().all()
    assert torch.equal(got[others], kernel.run_routed(x[others], weights[others], ids[others], experts.weights))


def test_any_number_of_programs_computes_every_tile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are shared by the programs that fit on the device; results do not depend on their number."""
    experts = Experts("bf16", 4, 64, 72)
    counts = torch.randint(0, 40, (4,), dtype=torch.int32)
    x, found = experts.rows(4, 40, 64), []
    for programs in (1, 3, 1 << 30):
        monkeypatch.setattr(triton_grouped_gemm, "num_programs", lambda most, *sizes, limit=programs: min(most, limit))
        batch = ExpertBatch("padded", x, counts=counts, mean_rows=16)
        found.append(kernel.run(batch, experts.weights))
    for expert, count in enumerate(counts.tolist()):
        first, *others = (rows[expert, :count] for rows in found)
        assert first.isfinite().all() and all(torch.equal(first, rows) for rows in others)


def test_a_launch_has_no_more_programs_than_the_device_holds() -> None:
    """V3's 16 experts of a rank with room for 1,024 rows each: 4,096 and 14,336 tiles of 64 rows."""
    absent = torch.device("meta")  # 132 SMs
    first, second = BLOCK_FP8.gate_up.at(64), BLOCK_FP8.down.at(64)
    assert num_programs(16 * 16 * 16, first, 256, 128, 1, absent) == 132  # 3 steps of 40 KiB of 227
    assert num_programs(16 * 16 * 56, second, 128, 128, 1, absent) == 3 * 132  # 3 steps of 24 KiB
    assert num_programs(100, first, 256, 128, 1, absent) == 100
    assert programs_per_sm(1024, 4, 8) == 8  # by threads


def test_bytes_and_moving() -> None:
    plain, fp8 = Experts("bf16", 3, 160, 136), Experts("fp8", 3, 160, 136)
    assert plain.weights.num_bytes == 3 * 3 * 160 * 136 * 2
    assert fp8.weights.num_bytes == 3 * (3 * 160 * 136 + 4 * (2 * 2 * 2 + 2 * 2))
    for experts in (plain, fp8):
        weights: ExpertWeights = experts.weights
        for target, source in zip(kernel.expert_memory(weights, 0), kernel.expert_memory(weights, 2), strict=True):
            assert target.is_contiguous()
            target.copy_(source)
        x = experts.rows(4, 160)
        offsets = torch.tensor([0, 4, 4, 4], dtype=torch.int32)
        experts.check(kernel.run(ExpertBatch("grouped", x, offsets=offsets), weights), experts.apply(x, 2))
    with pytest.raises(ValueError, match="unknown layout"):
        kernel.run(ExpertBatch("sorted", x), plain.weights)


def test_no_tokens() -> None:
    experts = Experts("fp8", 3, 128, 128)
    empty = torch.empty(0, 128)
    assert kernel.run_routed(empty, torch.empty(0, 2), torch.empty(0, 2).int(), experts.weights).shape == (0, 128)
    batch = ExpertBatch("grouped", empty, offsets=torch.zeros(4, dtype=torch.int32))
    assert kernel.run(batch, experts.weights).shape == (0, 128)


def test_tables_and_floors() -> None:
    for _, tiles in BLOCK_FP8.gate_up.rows:
        assert tiles.block_n == 128  # a tile is one block of its quantized output
    for _, tiles in (*BLOCK_FP8.down.rows, *PLAIN.gate_up.rows, *PLAIN.down.rows, *WIDE.down.rows):
        assert tiles.block_n <= 128 and tiles.split == 1
    one = ExpertShape(DEEPSEEK_V3, 1, 256)
    assert one.experts_hit == pytest.approx(8) and one.rows == 8
    assert one.flops == 8 * 6 * 7168 * 2048
    assert one.bytes == pytest.approx(8 * 3 * (7168 * 2048 + 4 * 56 * 16) + 4 * 7168, rel=1e-9)
    names = [shape.name for shape in named_shapes()]
    assert len(names) == len(set(names))
