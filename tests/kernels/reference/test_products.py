"""Linear and expert products of the torch rows against their formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch, ExpertWeights
from moe_engine.kernels.experts.reference import TorchExperts
from moe_engine.kernels.gate_form import SQUARED
from moe_engine.kernels.linear.cublas import CublasLinear
from moe_engine.kernels.linear.reference import TorchLinear
from moe_engine.parallel.experts import make_routed_experts
from tests.kernels.cpu.formulas import NAN, close, gated, normal

FP32 = torch.float32


def test_linear_of_a_strided_view() -> None:
    kernel = TorchLinear()
    x, weight, bias = normal(6, 20, dtype=FP32)[:, 4:16], normal(9, 12, dtype=FP32), normal(9, dtype=FP32)
    prepared = kernel.prepare(weight, bias)
    assert (prepared.in_features, prepared.out_features, prepared.num_bytes) == (12, 9, (9 * 12 + 9) * 4)
    got = kernel.run(x, prepared)
    assert got.is_contiguous()
    close(got, x.double() @ weight.double().T + bias.double())


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_written_to_given_memory(bias: bool) -> None:
    kernel, out = CublasLinear(), torch.zeros(8, 9)
    x, weight = normal(6, 12, dtype=FP32), normal(9, 12, dtype=FP32)
    prepared = kernel.prepare(weight, normal(9, dtype=FP32) if bias else None)
    assert torch.equal(kernel.run_into(x, prepared, out[1:7]), kernel.run(x, prepared))
    assert (out[0] == 0).all() and (out[7] == 0).all() and (out[1:7] != 0).any(1).all()


@pytest.mark.parametrize("strided_out", [False, True])
def test_heads(strided_out: bool) -> None:
    kernel = TorchLinear()
    x, weight = normal(5, 3, 10, dtype=FP32)[..., 2:8], normal(3, 7, 6, dtype=FP32)
    out = torch.zeros(5, 3, 11)
    target = out[..., 1:8] if strided_out else None
    got = kernel.run_heads(x, kernel.prepare_heads(weight), out=target)
    close(got, torch.einsum("thk,hnk->thn", x.double(), weight.double()))
    if strided_out:
        assert got.data_ptr() == out[..., 1:8].data_ptr()
        assert (out[..., 0] == 0).all() and (out[..., 8:] == 0).all()


def experts() -> tuple[TorchExperts, ExpertWeights, list[tuple[Tensor, Tensor, Tensor]]]:
    """Five experts of 12 inputs and an inner width of 8, in the kernel's memory and as plain values."""
    kernel = TorchExperts()
    weights = kernel.allocate(5, 12, 8, FP32, "cpu")
    parts = [(normal(8, 12, dtype=FP32), normal(8, 12, dtype=FP32), normal(12, 8, dtype=FP32)) for _ in range(5)]
    for expert, part in enumerate(parts):
        kernel.load_expert(weights, expert, *part)
    return kernel, weights, parts


def test_without_a_gate() -> None:
    kernel = TorchExperts()
    weights = kernel.allocate(3, 12, 8, FP32, "cpu", squared=True)
    weights.activation, counts = SQUARED, [2, 0, 3]
    parts = [(normal(4, 12, dtype=FP32), normal(4, 12, dtype=FP32), normal(12, 8, dtype=FP32)) for _ in counts]
    for expert, part in enumerate(parts):
        kernel.load_expert(weights, expert, *part)
    x, offsets = normal(5, 12, dtype=FP32), torch.tensor([0, *counts]).cumsum(0).int()
    got = kernel.run(ExpertBatch("grouped", x, offsets=offsets), weights)
    close(got, torch.cat([gated(rows, *part, SQUARED) for rows, part in zip(x.split(counts), parts)]))


def test_grouped_and_padded_layouts() -> None:
    kernel, weights, parts = experts()
    counts, x = [2, 0, 3, 1, 0], normal(6, 12, dtype=FP32)
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    grouped = kernel.run(ExpertBatch("grouped", x, offsets=offsets), weights)
    close(grouped, torch.cat([gated(rows, *part) for rows, part in zip(x.split(counts), parts)]))
    padded = torch.full((5, 4, 12), NAN)
    for expert, rows in enumerate(x.split(counts)):
        padded[expert, : len(rows)] = rows
    got = kernel.run(ExpertBatch("padded", padded, counts=torch.tensor(counts).int()), weights)
    for expert, rows in enumerate(grouped.split(counts)):
        close(got[expert, : len(rows)], rows.double())


def test_routed() -> None:
    kernel, weights, parts = experts()
    x, topk_weights = normal(9, 12, dtype=FP32), normal(9, 2, dtype=FP32)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(9)]).int()
    got = make_routed_experts(kernel, weights).run(x, topk_weights, ids)
    each = torch.stack([gated(x, *part) for part in parts])
    close(got, (topk_weights.double().unsqueeze(-1) * each[ids.long(), torch.arange(9)[:, None]]).sum(1))
