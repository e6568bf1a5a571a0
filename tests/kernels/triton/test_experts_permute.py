"""Sorting choices by expert, gathering rows and summing them back, in Triton and in torch, against plain loops."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.permutation import expert_order as torch_order
from moe_engine.kernels.permutation import triton_permute
from moe_engine.kernels.permutation.triton_permute import permute_quantize
from moe_engine.kernels.quantization import reference
from tests.kernels.triton.poison import poisoned_memory


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned_memory():
        yield


both = pytest.mark.parametrize("kernels", [triton_permute, torch_order], ids=["triton", "torch"])


def choices(tokens: int, top_k: int, num_experts: int) -> Tensor:
    """Some ids on either side of what exists here."""
    return torch.randint(-2, num_experts + 3, (tokens, top_k), dtype=torch.int32)


@both
# one pair; several programs; groups that are aligned; an expert that no token or every token chose
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
def test_sort_by_expert(kernels: ModuleType, ids: Tensor, num_experts: int, align: int) -> None:
    order = kernels.sort_by_expert(ids, num_experts, align)
    flat, start = ids.flatten(), 0
    for expert in range(num_experts):
        pairs = (flat == expert).nonzero().flatten()
        end = start + -(-len(pairs) // align) * align
        assert (int(order.offsets[expert]), int(order.offsets[expert + 1])) == (start, end)
        assert int(order.ends[expert]) == start + len(pairs)
        assert torch.equal(order.source[start : start + len(pairs)].long(), pairs)  # by token inside an expert
        assert (order.source[start + len(pairs) : end] == -1).all()
        assert torch.equal(order.positions.flatten()[pairs].long(), start + torch.arange(len(pairs)))
        start = end
    assert start <= len(order.source)
    if align > 1:
        assert (order.source[start:] == -1).all()
        assert (flat >= 0).logical_and(flat < num_experts).all() or start < len(order.source)  # a row to spare
    assert (order.positions.flatten()[(flat < 0) | (flat >= num_experts)] == -1).all()


def test_many_pairs_share_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_permute, "_MAX_CHUNKS", 2)  # as 8192 tokens would, at the size of a test
    test_sort_by_expert(triton_permute, choices(150, 2, 6), 6, 1)


@both
@pytest.mark.parametrize("align", [1, 8])
def test_rows_there_and_back(kernels: ModuleType, align: int) -> None:
    tokens, top_k, num_experts, width = 29, 3, 6, 200
    ids, x = choices(tokens, top_k, num_experts), torch.randn(tokens, width)
    order = kernels.sort_by_expert(ids, num_experts, align)
    rows = kernels.permute(x, order)
    source = order.source.long()
    valid = (source >= 0) & (torch.arange(len(source)) < order.offsets[-1])
    assert torch.equal(rows[valid], x[source[valid] // top_k]) and (rows[source < 0] == 0).all()
    before = reference.quantize_rows(x)
    carried = kernels.permute_rows(before, order)
    for ours, theirs in (
        (carried.data.view(torch.uint8), before.data.view(torch.uint8)),
        (carried.scales, before.scales),
    ):
        assert torch.equal(ours[valid], theirs[source[valid] // top_k])
    assert (carried.scales[source < 0] == 1).all()
    rows[~valid] = 0
    quantized, want = permute_quantize(x, order), reference.quantize_rows(rows)
    torch.testing.assert_close(quantized.scales, want.scales, rtol=1e-6, atol=0)
    assert (quantized.data.float() != want.data.float()).float().mean() < 0.01
    rows[~valid] = torch.nan  # never read
    weights, add = torch.rand(tokens, top_k), torch.randn(tokens, width + 8)[:, 4:-4]
    known = (ids >= 0) & (ids < num_experts)
    total = weights.where(known, 0).double().sum(1, keepdim=True) * x.double()
    weights[~known] = torch.nan  # a static exchange leaves them as they were
    torch.testing.assert_close(kernels.combine(rows, order.positions, weights).double(), total, rtol=1e-5, atol=1e-5)
    got = kernels.combine(rows, order.positions, weights, add)
    torch.testing.assert_close(got.double(), total + add.double(), rtol=1e-5, atol=1e-5)


@both
def test_no_tokens(kernels: ModuleType) -> None:
    order = kernels.sort_by_expert(torch.empty(0, 4, dtype=torch.int32), 6)
    assert order.offsets.tolist() == [0] * 7 and len(order.source) == 0
    assert kernels.permute(torch.empty(0, 64), order).shape == (0, 64)
    assert kernels.permute_rows(reference.quantize_rows(torch.empty(0, 64)), order).data.shape == (0, 64)
    assert kernels.combine(torch.empty(0, 64), order.positions, torch.empty(0, 4)).shape == (0, 64)
