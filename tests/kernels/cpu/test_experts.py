"""Routed experts: both layouts, the fused call, odd sizes, experts without rows, bits independent of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.experts.batch import ExpertBiases
from moe_engine.kernels.experts.cpu import CpuExperts
from moe_engine.kernels.experts.protocol import ExpertBatch, ExpertWeights
from moe_engine.kernels.gate_form import GELU, SILU, SQUARED, GatedActivation
from tests.kernels.cpu.conftest import threads
from tests.kernels.cpu.formulas import NAN, biased, close, gated, normal

Parts = list[tuple[Tensor, Tensor, Tensor]]
FORMS = (SILU, GELU, GatedActivation(0.9), GatedActivation(-0.4), GatedActivation(1.5, beta=0.8), SQUARED)


def _experts(
    kernel: CpuExperts, count: int, hidden: int, width: int, dtype: torch.dtype, form: GatedActivation = SILU
) -> tuple[ExpertWeights, Parts]:
    """Experts with an activation; without a gate their width is `width`, and each matrix is a half."""
    if form.squared:
        assert kernel.capabilities.allocate_squared is not None
        weights = kernel.capabilities.allocate_squared(count, hidden, 2 * width, dtype, "cpu")
    else:
        weights = kernel.allocate(count, hidden, width, dtype, "cpu")
        weights.activation = form
    weights.data.storage.fill_(0xFF)  # NaN in any part that loading does not write
    parts = []
    for expert in reversed(range(count)):
        gate, up = (normal(width, hidden, dtype=dtype, scale=0.2) for _ in range(2))
        parts.append((gate, up, normal(hidden, weights.width, dtype=dtype, scale=0.2)))
        kernel.load_expert(weights, expert, *parts[-1])
    return weights, parts[::-1]


def _routing(tokens: int, top_k: int, experts: int) -> tuple[Tensor, Tensor]:
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]) if tokens else torch.empty(0, top_k)
    return torch.rand(tokens, top_k), ids.int()


def _want(x: Tensor, weights: Tensor, ids: Tensor, parts: Parts, form: GatedActivation = SILU) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist()):
            if 0 <= expert < len(parts):
                out[token] += weight * gated(x[token : token + 1], *parts[expert], form)[0]
    return out


@pytest.mark.parametrize(("hidden", "width"), [(64, 32), (50, 23), (128, 80)])
@pytest.mark.parametrize("tokens", [0, 1, 7, 120])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_routed(
    any_library: Library, dtype: torch.dtype, hidden: int, width: int, tokens: int, form: GatedActivation
) -> None:
    kernel = CpuExperts(any_library)
    weights, parts = _experts(kernel, 6, hidden, width, dtype, form)
    x = normal(tokens, hidden, dtype=dtype)
    topk, ids = _routing(tokens, 3, 5)  # expert 5 has no rows
    got = kernel.run_routed(x, topk, ids, weights)
    close(got, _want(x, topk, ids, parts, form), 2)
    more = normal(tokens, hidden, dtype=dtype)
    assert torch.equal(kernel.run_routed(x, topk, ids, weights, add=more), got + more)


def _biases(count: int, hidden: int, width: int) -> ExpertBiases:
    return ExpertBiases(torch.randn(count, 2 * width), torch.randn(count, hidden), 1.702, 0.9)


@pytest.mark.parametrize(("hidden", "width"), [(64, 32), (50, 23)])
@pytest.mark.parametrize("tokens", [1, 37])
def test_biases(any_library: Library, dtype: torch.dtype, hidden: int, width: int, tokens: int) -> None:
    kernel = CpuExperts(any_library)
    weights, parts = _experts(kernel, 5, hidden, width, dtype)
    weights.bias = bias = _biases(5, hidden, width)
    x = normal(tokens, hidden, dtype=dtype)
    topk, ids = _routing(tokens, 3, 5)
    want = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(tokens):
        for weight, expert in zip(topk[token].tolist(), ids[token].tolist()):
            want[token] += weight * biased(x[token : token + 1], *parts[expert], bias, expert)[0]
    close(kernel.run_routed(x, topk, ids, weights), want, 3)
    more = normal(tokens, hidden, dtype=dtype)
    alone = kernel.run_routed(x, topk, ids, weights)
    assert torch.equal(kernel.run_routed(x, topk, ids, weights, add=more), alone + more)
    counts = [tokens, 0, 3, 1, 2]
    rows = normal(sum(counts), hidden, dtype=dtype)
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    grouped = [biased(part, *parts[e], bias, e) for e, part in enumerate(rows.split(counts))]
    close(kernel.run(ExpertBatch("grouped", rows, offsets=offsets), weights), torch.cat(grouped), 3)
    weights.bias, weights.activation = None, GatedActivation(bias.limit, bias.alpha)
    none = ExpertBiases(torch.zeros(5, 2 * width), torch.zeros(5, hidden), bias.alpha, bias.limit)
    grouped = [biased(part, *parts[e], none, e) for e, part in enumerate(rows.split(counts))]
    got = kernel.run(ExpertBatch("grouped", rows, offsets=offsets), weights)
    close(got, torch.cat(grouped), 3)
    weights.bias = none
    assert torch.equal(kernel.run(ExpertBatch("grouped", rows, offsets=offsets), weights), got)


def test_ids_of_other_ranks_contribute_nothing(library: Library, dtype: torch.dtype) -> None:
    kernel = CpuExperts(library)
    weights, parts = _experts(kernel, 4, 32, 16, dtype)
    x, topk = normal(3, 32, dtype=dtype), torch.rand(3, 2)
    ids = torch.tensor([[0, -1], [9, 3], [-1, 4]], dtype=torch.int32)
    close(kernel.run_routed(x, topk, ids, weights), _want(x, topk, ids, parts), 2)


@pytest.mark.parametrize(("hidden", "width"), [(64, 32), (50, 23)])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_grouped_and_padded(
    any_library: Library, dtype: torch.dtype, hidden: int, width: int, form: GatedActivation
) -> None:
    kernel = CpuExperts(any_library)
    weights, parts = _experts(kernel, 5, hidden, width, dtype, form)
    counts = [3, 0, 110, 1, 8]
    x = normal(sum(counts), hidden, dtype=dtype)
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    want = torch.cat([gated(rows, *part, form) for rows, part in zip(x.split(counts), parts)])
    grouped = kernel.run(ExpertBatch("grouped", x, offsets=offsets), weights)
    close(grouped, want, 2)
    padded = torch.full((5, 115, hidden), NAN, dtype=dtype)
    for expert, rows in enumerate(x.split(counts)):
        padded[expert, : len(rows)] = rows
    out = kernel.run(ExpertBatch("padded", padded, counts=torch.tensor(counts).int()), weights)
    for expert, rows in enumerate(grouped.split(counts)):
        assert torch.equal(out[expert, : len(rows)], rows)


def test_no_rows(library: Library, dtype: torch.dtype) -> None:
    kernel = CpuExperts(library)
    weights, _ = _experts(kernel, 2, 16, 16, dtype)
    empty = torch.empty(0, 16, dtype=dtype)
    assert kernel.run(ExpertBatch("grouped", empty, offsets=torch.zeros(3).int()), weights).shape == (0, 16)
    padded = torch.empty(2, 0, 16, dtype=dtype)
    assert kernel.run(ExpertBatch("padded", padded, counts=torch.zeros(2).int()), weights).shape == (2, 0, 16)


def test_bits_of_a_token_do_not_depend_on_the_batch(any_library: Library, dtype: torch.dtype) -> None:
    kernel = CpuExperts(any_library)
    weights, _ = _experts(kernel, 8, 72, 40, dtype)
    x = normal(250, 72, dtype=dtype)
    topk, ids = _routing(250, 4, 8)
    whole = kernel.run_routed(x, topk, ids, weights)
    for start, stop in ((0, 1), (17, 18), (3, 9), (20, 53), (100, 220)):
        part = slice(start, stop)
        assert torch.equal(kernel.run_routed(x[part], topk[part], ids[part], weights), whole[part])
    with threads(1):
        assert torch.equal(kernel.run_routed(x, topk, ids, weights), whole)


def test_wrong_weights_are_refused(library: Library) -> None:
    kernel = CpuExperts(library)
    weights = kernel.allocate(2, 16, 8, torch.float32, "cpu")
    with pytest.raises(ValueError, match="expected"):
        kernel.load_expert(weights, 0, torch.zeros(8, 16), torch.zeros(8, 16), torch.zeros(8, 16))
    with pytest.raises(IndexError):
        kernel.load_expert(weights, 2, torch.zeros(8, 16), torch.zeros(8, 16), torch.zeros(16, 8))
