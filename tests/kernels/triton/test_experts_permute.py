"""Sorting choices by expert, gathering rows and summing them back, in Triton and in torch, against plain loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.permutation import triton_permute
from moe_engine.kernels.permutation.protocol import ExpertOrder, Permutation
from moe_engine.kernels.permutation.reference import TorchPermutation
from moe_engine.kernels.permutation.triton_permute import TritonPermutation
from moe_engine.kernels.quantization import reference
from moe_engine.kernels.quantization.protocol import QuantizedRows
from tests.distributed.dispatch.row_sums import check_row_sums
from tests.kernels.triton import beside
from tests.kernels.triton.launches import launches

both = pytest.mark.parametrize("kernels", [TritonPermutation(), TorchPermutation()], ids=lambda kernels: kernels.name)


def choices(tokens: int, top_k: int, num_experts: int) -> Tensor:
    """Some ids below and above the local range."""
    return torch.randint(-2, num_experts + 3, (tokens, top_k), dtype=torch.int32)


@both
# one pair; several programs; aligned groups; an expert chosen by no token or by every token
@pytest.mark.parametrize(
    ("ids", "num_experts", "align"),
    [
        (choices(1, 1, 3), 3, 1),
        (choices(37, 3, 5), 5, 1),
        (choices(90, 4, 7), 7, 16),
        (choices(50, 2, 256), 256, 4),
        (torch.full((70, 1), 2, dtype=torch.int32), 4, 8),
        (torch.full((5, 2), -1, dtype=torch.int32), 4, 8),
        (choices(3, 4, 60).long()[:, :2], 60, 1),
    ],
)
def test_sort_by_expert(kernels: Permutation, ids: Tensor, num_experts: int, align: int) -> None:
    order = kernels.sort_by_expert(ids, num_experts, align)
    flat, start = ids.flatten(), 0
    for expert in range(num_experts):
        pairs = (flat == expert).nonzero().flatten()
        end = start + -(-len(pairs) // align) * align
        assert (int(order.offsets[expert]), int(order.offsets[expert + 1])) == (start, end)
        assert int(order.ends[expert]) == start + len(pairs)
        assert torch.equal(order.source[start : start + len(pairs)].long(), pairs)  # ordered by token within an expert
        assert (order.source[start + len(pairs) : end] == -1).all()
        assert torch.equal(order.positions.flatten()[pairs].long(), start + torch.arange(len(pairs)))
        start = end
    assert start <= len(order.source)
    if align > 1:
        assert (order.source[start:] == -1).all()
        assert (flat >= 0).logical_and(flat < num_experts).all() or start < len(order.source)  # an unused row
    assert (order.positions.flatten()[(flat < 0) | (flat >= num_experts)] == -1).all()


@pytest.mark.parametrize("counted", [False, True])
def test_many_pairs_share_programs(monkeypatch: pytest.MonkeyPatch, counted: bool) -> None:
    """As with 8,192 tokens, at the size of a test. Few pairs are sorted in one launch, more in two."""
    monkeypatch.setattr(triton_permute, "_MAX_CHUNKS", 2)
    monkeypatch.setattr(triton_permute, "_ONE_LAUNCH", 0 if counted else 1 << 16)
    monkeypatch.setattr(triton_permute, "_WIDE", 8)
    with launches() as names:
        test_sort_by_expert(TritonPermutation(), choices(150, 2, 6), 6, 1)
    assert names == ["count_kernel"] * counted + ["place_kernel"]


def test_programs_of_a_sort_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting and placing in one launch, whose programs run in any order, gives the result of two launches. A device
    that cannot run all programs at once uses two."""
    monkeypatch.setattr(triton_permute, "_ONE_LAUNCH", 0)
    monkeypatch.setattr(triton_permute, "resident_programs", lambda device: 4)
    kernels, ids = TritonPermutation(), choices(120, 2, 6)
    kernels.sort_in_one_launch(ids.device)

    def sort(seed: int) -> ExpertOrder:
        return beside.run_ranks([lambda: kernels.sort_by_expert(ids, 6)], [triton_permute.place_kernel], seed)[0]

    with launches() as names:
        found = [sort(seed) for seed in range(2)]
        monkeypatch.setattr(triton_permute, "resident_programs", lambda device: 3)
        expected = kernels.sort_by_expert(ids, 6)
    assert names == ["place_kernel"] * 2 + ["count_kernel", "place_kernel"]
    for order in found:
        assert torch.equal(order.positions, expected.positions) and torch.equal(order.offsets, expected.offsets)
        valid = int(order.offsets[-1])
        assert torch.equal(order.ends, expected.ends) and torch.equal(order.source[:valid], expected.source[:valid])


@both
@pytest.mark.parametrize("capacity", [40, 5])  # the second is too small for some experts
def test_places_in_padded_groups(kernels: Permutation, capacity: int) -> None:
    ids = choices(40, 3, 6)
    counts, positions = kernels.place(ids, 6, capacity)
    flat = positions.flatten()
    for expert in range(6):
        pairs = (ids.flatten() == expert).nonzero().flatten()
        kept = pairs[:capacity]
        assert int(counts[expert]) == len(kept)
        assert torch.equal(flat[kept].long(), expert * capacity + torch.arange(len(kept)))
        assert (flat[pairs[capacity:]] == -1).all()
    assert (flat[((ids < 0) | (ids >= 6)).flatten()] == -1).all()
    counts, positions = kernels.place(ids[:0], 6, capacity)
    assert counts.tolist() == [0] * 6 and positions.shape == (0, 3)


@both
@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("columns", [True, False])  # scales in the layout of products, or of records
def test_rows_there_and_back(kernels: Permutation, align: int, columns: bool) -> None:
    tokens, top_k, num_experts, width = 29, 3, 6, 200
    ids, wide = choices(tokens, top_k, num_experts), torch.randn(tokens, width + 8)
    x = wide[:, :width]
    order = kernels.sort_by_expert(ids, num_experts, align)
    source = order.source.long()
    valid = (source >= 0) & (torch.arange(len(source)) < order.offsets[-1])
    rows = torch.empty(len(source), width)
    kernels.permute(x, order.positions, rows)
    assert torch.equal(rows[valid], x[source[valid] // top_k])

    before, carried = reference.quantize_rows(x), QuantizedRows.empty(len(source), width, "cpu")
    scales = carried.scales if columns else torch.empty(carried.scales.shape)
    kernels.permute(before.data, order.positions, carried.data, before.scales, scales)
    for ours, theirs in ((carried.data.view(torch.uint8), before.data.view(torch.uint8)), (scales, before.scales)):
        assert torch.equal(ours[valid], theirs[source[valid] // top_k])

    rows[~valid] = torch.nan  # never read
    weights, add = torch.rand(tokens, top_k), torch.randn(tokens, width + 8)[:, 4:-4]
    known = (ids >= 0) & (ids < num_experts)
    total = weights.where(known, 0).double().sum(1, keepdim=True) * x.double()
    weights[~known] = torch.nan  # a static exchange does not write them
    torch.testing.assert_close(kernels.combine(rows, order.positions, weights).double(), total, rtol=1e-5, atol=1e-5)
    got = kernels.combine(rows, order.positions, weights, add)
    torch.testing.assert_close(got.double(), total + add.double(), rtol=1e-5, atol=1e-5)


def test_rows_without_a_position_stay_as_they_are() -> None:
    """Padding is not written: the cost of a batch depends only on its tokens, not on its capacity."""
    ids = choices(20, 2, 4)
    counts, positions = TritonPermutation().place(ids, 4, 20)
    out = torch.full((80, 64), 7.0)
    TritonPermutation().permute(torch.randn(20, 64), positions, out)
    written = (out != 7.0).any(1).view(4, 20)
    assert torch.equal(written, torch.arange(20) < counts.unsqueeze(1))


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [True, False])
def test_sums_are_rounded_once(kernels: Permutation, dtype: torch.dtype, weighted: bool) -> None:
    check_row_sums(kernels.combine, dtype, 64, 5, weighted)


@both
def test_no_tokens_and_no_rows(kernels: Permutation) -> None:
    order = kernels.sort_by_expert(torch.empty(0, 4, dtype=torch.int32), 6)
    assert order.offsets.tolist() == [0] * 7 and len(order.source) == 0
    kernels.permute(torch.empty(0, 64), order.positions, torch.empty(0, 64))
    assert kernels.combine(torch.empty(0, 64), order.positions, torch.empty(0, 4)).shape == (0, 64)
    nowhere = torch.full((3, 2), -1, dtype=torch.int32)
    kernels.permute(torch.randn(3, 64), nowhere, torch.empty(0, 64))
    assert torch.equal(kernels.combine(torch.empty(0, 64), nowhere, torch.rand(3, 2)), torch.zeros(3, 64))
