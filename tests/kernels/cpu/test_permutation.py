"""Every row of the family against plain loops and float64: destinations of tokens, contents of records, sums of
rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moe_engine.kernels import permutation_choice as choice_module
from moe_engine.kernels import tables
from moe_engine.kernels.cpu.library import Library, LibraryError
from moe_engine.kernels.device import Need, cpu_device
from moe_engine.kernels.permutation.cpu import CpuPermutation
from moe_engine.kernels.permutation.protocol import Permutation, Records
from moe_engine.kernels.permutation.reference import TorchPermutation
from moe_engine.kernels.permutation_choice import permutation
from moe_engine.kernels.registry import Choice
from tests.distributed.dispatch.row_sums import check_row_sums
from tests.kernels.cpu.conftest import threads
from tests.models.rows import cpu_rows_of

RANKS, LOCAL, TOP_K = 3, 4, 5
SIZES = [0, 1, 7, 40]


@pytest.fixture(params=cpu_rows_of(tables.PERMUTATION), ids=lambda row: row.name)
def kernel(request: pytest.FixtureRequest) -> Permutation:
    """Every row of the family that can run here."""
    why_not = request.param.why_not(cpu_device(), Need("bfloat16"))
    if why_not:
        pytest.skip(why_not)
    return Choice("permutation", request.param, "tested").build()


def draw_ids(num_tokens: int, seed: int = 0) -> Tensor:
    """Distinct experts of all ranks, some -1, in non-adjacent rows."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((num_tokens, TOP_K + 3), 99, dtype=torch.int32)
    for row in wide:
        row[:TOP_K] = torch.randperm(RANKS * LOCAL, generator=generator)[:TOP_K]
        row[:TOP_K][torch.rand(TOP_K, generator=generator) < 0.3] = -1
    return wide[:, :TOP_K]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("row", "right"),
    [([0, -1, 11, 3, -1], True), ([0, 5, 5, 1, 2], False), ([0, 1, 2, 3, 12], False), ([0, -2, 1, 2, 3], False)],
)
def test_wrong_choices_are_seen(kernel: Permutation, row: list[int], right: bool, dtype: torch.dtype) -> None:
    ids = torch.stack([*draw_ids(3).to(dtype), torch.tensor(row, dtype=dtype)])
    assert kernel.valid(ids, RANKS * LOCAL) is right
    assert kernel.valid(ids[:0], RANKS * LOCAL)


def test_an_id_beyond_32_bits_is_seen(kernel: Permutation) -> None:
    assert not kernel.valid(torch.tensor([[1, 2**32]]), RANKS * LOCAL)


@pytest.mark.parametrize("lost", [None, 1])
@pytest.mark.parametrize("num_tokens", SIZES)
def test_a_token_goes_once_to_each_rank_that_takes_part(kernel: Permutation, num_tokens: int, lost: int | None) -> None:
    ids = draw_ids(num_tokens)
    takes_part = torch.tensor([rank != lost for rank in range(RANKS)])
    positions, counts = kernel.route(ids, LOCAL, takes_part)
    expected = [[-1] * RANKS for _ in range(num_tokens)]
    number, sent = 0, []
    for rank in range(RANKS):
        before = number
        for token, row in enumerate(ids.tolist()):
            if rank != lost and any(LOCAL * rank <= expert < LOCAL * (rank + 1) for expert in row):
                expected[token][rank] = number
                number += 1
        sent.append(number - before)
    assert positions.tolist() == expected and counts.tolist() == sent and positions.dtype == torch.int32


@dataclass
class Sent:
    """Records in the layout of `pack`: one block for each rank, with an unwritten gap before it."""

    records: Records
    memory: Tensor
    begins: list[int]
    counts: list[int]


def pack(kernel: Permutation, data: Tensor, ids: Tensor) -> Sent:
    records = Records(96, 64, TOP_K)
    positions, found = kernel.route(ids, LOCAL, torch.ones(RANKS, dtype=torch.bool))
    counts = found.tolist()
    begins, bases, end, first = [], [], 0, 0
    for count in counts:
        begins.append(end + 32)
        bases.append(end + 32 - 96 * first)
        end, first = begins[-1] + 96 * count, first + count
    memory = torch.full((end,), 0xEE, dtype=torch.uint8)
    kernel.pack([(data, 0), (ids, 64)], positions, bases, records, memory)
    return Sent(records, memory, begins, counts)


@pytest.mark.parametrize("num_tokens", SIZES)
def test_records_are_packed_by_rank_and_taken_where_an_expert_is(kernel: Permutation, num_tokens: int) -> None:
    ids = draw_ids(num_tokens)
    data = torch.randn(num_tokens, 40, generator=torch.Generator().manual_seed(1)).bfloat16()[:, :30]
    sent = pack(kernel, data, ids)
    wanted = [[t for t in range(num_tokens) if bool((ids[t] // LOCAL == rank).any())] for rank in range(RANKS)]
    assert sent.counts == [len(tokens) for tokens in wanted]
    for begin, tokens in zip(sent.begins, wanted):
        found = sent.memory[begin : begin + 96 * len(tokens)].view(-1, 96)
        assert torch.equal(found[:, :60].contiguous().view(torch.bfloat16), data[tokens])
        assert torch.equal(found[:, 64:84].contiguous().view(torch.int32), ids[tokens])
        assert found[:, 60:64].eq(0xEE).all() and sent.memory[begin - 32 : begin].eq(0xEE).all()

    first = LOCAL  # of rank 1, which now reads all records
    out = torch.full((sum(sent.counts), 96), 0x77, dtype=torch.uint8)
    taken = kernel.take(sent.memory, sent.begins, sent.counts, sent.records, (first, LOCAL), out)
    here = [[t for t in tokens if t in wanted[1]] for tokens in wanted]
    flat = [t for tokens in here for t in tokens]
    assert taken == [len(tokens) for tokens in here] and out[len(flat) :].eq(0x77).all()
    found = out[: len(flat)]
    assert torch.equal(found[:, :60].contiguous().view(torch.bfloat16), data[flat])
    local = torch.where(ids // LOCAL == 1, ids - first, -1)
    assert torch.equal(found[:, 64:84].contiguous().view(torch.int32), local[flat])
    kernel.localize(ids, (first, LOCAL))
    assert torch.equal(ids, local)


@pytest.mark.parametrize("num_tokens", SIZES)
def test_rows_are_sorted_by_expert_then_by_token(kernel: Permutation, num_tokens: int) -> None:
    ids = draw_ids(num_tokens, seed=2)
    ids[: num_tokens // 4, :2] = 3  # named twice: low latency does not check
    experts = RANKS * LOCAL - 2  # larger ids are another rank's
    data = torch.randn(num_tokens, 24, generator=torch.Generator().manual_seed(3))[:, 4:20]
    offsets, positions = kernel.group(ids, experts)
    pairs = [(e, n, k) for n, row in enumerate(ids.tolist()) for k, e in enumerate(row) if 0 <= e < experts]
    expected = torch.full((num_tokens, TOP_K), -1, dtype=torch.int32)
    for number, (_, n, k) in enumerate(sorted(pairs)):
        expected[n, k] = number
    assert torch.equal(positions, expected)
    assert offsets.dtype == torch.int32
    assert offsets.tolist() == [sum(e < end for e, _, _ in pairs) for end in range(experts + 1)]
    rows = torch.full((len(pairs), 16), float("nan"))
    kernel.permute(data, positions, rows)
    assert torch.equal(rows, data[[n for _, n, _ in sorted(pairs)]])


@pytest.mark.parametrize("hidden", [64, 200])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_rounded_once(kernel: Permutation, dtype: torch.dtype, weighted: bool, hidden: int) -> None:
    check_row_sums(kernel.combine, dtype, hidden, TOP_K, weighted)


def test_sums_in_float16_by_the_row_that_serves() -> None:
    assert permutation(torch.float16).name == "torch"
    check_row_sums(permutation(torch.float16).combine, torch.float16, 64, TOP_K, True)


def test_sums_on_other_machines(any_library: Library) -> None:
    check_row_sums(CpuPermutation(any_library).combine, torch.bfloat16, 200, TOP_K, True)


def test_many_rows_are_shared_out_among_threads(library: Library) -> None:
    """Enough work for several threads gives the results of the torch row."""
    ours, theirs = CpuPermutation(library), TorchPermutation()
    ids, data = draw_ids(600), torch.randn(600, 15)
    generator = torch.Generator().manual_seed(5)
    rows, weights = torch.randn(500, 512, generator=generator), torch.rand(600, TOP_K, generator=generator)
    positions = torch.randint(-1, 500, (600, TOP_K), generator=generator, dtype=torch.int32)
    with threads(3):
        assert torch.equal(pack(ours, data, ids).memory, pack(theirs, data, ids).memory)
        torch.testing.assert_close(ours.combine(rows, positions, weights), theirs.combine(rows, positions, weights))
        _, places = theirs.group(ids, RANKS * LOCAL)
        spread = torch.zeros(int(places.max()) + 1, 512), torch.zeros(int(places.max()) + 1, 512)
        wide = torch.randn(600, 512, generator=generator)
        for one, out in zip((ours, theirs), spread):
            one.permute(wide, places, out)
        assert torch.equal(*spread)


def test_without_a_library_torch_serves_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: object, library: object = None) -> None:
        raise LibraryError("g++ failed (1)")

    monkeypatch.setattr(CpuPermutation, "__init__", refuse)
    monkeypatch.setattr(choice_module, "probe_or_absent", lambda kind: replace(cpu_device(), compiler="g++"))
    assert permutation.__wrapped__(torch.bfloat16).name == "torch"
    assert "g++ failed (1)" in caplog.text
