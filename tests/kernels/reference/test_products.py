"""Linear and expert products of the torch rows against plain loops in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch, ExpertWeights
from moe_engine.kernels.experts.reference import TorchExperts
from moe_engine.kernels.linear.reference import TorchLinear
from moe_engine.parallel.experts import make_routed_experts


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_linear_of_a_strided_view() -> None:
    kernel = TorchLinear()
    x, weight, bias = rand(6, 20)[:, 4:16], rand(9, 12, seed=1), rand(9, seed=2)
    prepared = kernel.prepare(weight, bias)
    assert (prepared.in_features, prepared.out_features, prepared.num_bytes) == (12, 9, (9 * 12 + 9) * 4)
    got = kernel.run(x, prepared)
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T + bias.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strided_out", [False, True])
def test_heads(strided_out: bool) -> None:
    kernel = TorchLinear()
    whole, weight = rand(5, 3, 10), rand(3, 7, 6, seed=1)
    x = whole[..., 2:8]
    out = torch.zeros(5, 3, 11)
    target = out[..., 1:8] if strided_out else None
    got = kernel.run_heads(x, kernel.prepare_heads(weight), out=target)
    want = torch.stack([x[:, h].double() @ weight[h].double().T for h in range(3)], 1)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    if strided_out:
        assert got.data_ptr() == out[..., 1:8].data_ptr()
        assert (out[..., 0] == 0).all() and (out[..., 8:] == 0).all()


def naive_expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    g = x.double() @ gate.double().T
    return (g * torch.sigmoid(g) * (x.double() @ up.double().T)) @ down.double().T


def experts(
    num_experts: int = 5, hidden: int = 12, width: int = 8
) -> tuple[TorchExperts, ExpertWeights, list[tuple[Tensor, Tensor, Tensor]]]:
    kernel = TorchExperts()
    weights = kernel.allocate(num_experts, hidden, width, torch.float32, "cpu")
    parts = [
        (rand(width, hidden, seed=3 * e), rand(width, hidden, seed=3 * e + 1), rand(hidden, width, seed=3 * e + 2))
        for e in range(num_experts)
    ]
    for e, (gate, up, down) in enumerate(parts):
        kernel.load_expert(weights, e, gate, up, down)
    return kernel, weights, parts


def test_grouped_and_padded_layouts() -> None:
    kernel, weights, parts = experts()
    counts = [2, 0, 3, 1, 0]
    x = rand(6, 12, seed=99)
    offsets = torch.tensor([0, 2, 2, 5, 6, 6], dtype=torch.int32)
    got = kernel.run(ExpertBatch("grouped", x, offsets=offsets), weights)
    padded = torch.full((5, 4, 12), float("nan"))
    start = 0
    for e, count in enumerate(counts):
        want = naive_expert(x[start : start + count], *parts[e])
        torch.testing.assert_close(got[start : start + count].double(), want, rtol=1e-4, atol=1e-4)
        padded[e, :count] = x[start : start + count]
        start += count
    batch = ExpertBatch("padded", padded, counts=torch.tensor(counts, dtype=torch.int32))
    got_padded = kernel.run(batch, weights)
    start = 0
    for e, count in enumerate(counts):
        torch.testing.assert_close(got_padded[e, :count], got[start : start + count])
        start += count


def test_routed() -> None:
    kernel, weights, parts = experts()
    x, topk_weights = rand(9, 12, seed=50), rand(9, 2, seed=51)
    ids = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(t))[:2] for t in range(9)]).int()
    got = make_routed_experts(kernel, weights).run(x, topk_weights, ids)
    want = torch.zeros(9, 12, dtype=torch.float64)
    for t in range(9):
        for k in range(2):
            want[t] += topk_weights[t, k].double() * naive_expert(x[t : t + 1], *parts[int(ids[t, k])])[0]
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
