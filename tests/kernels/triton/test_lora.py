"""LoRA products in Triton's interpreter against the torch row in float64."""

from __future__ import annotations

import pytest
import torch

from moe_engine.kernels.lora.protocol import AdapterTokens, LoraWeights
from moe_engine.kernels.lora.reference import TorchLora
from moe_engine.kernels.lora.triton_lora import TritonLora


def tokens_of(count: int, slots: int) -> AdapterTokens:
    numbers = torch.randint(-1, slots, (count,)).numpy()
    numbers[0] = slots - 1
    tokens = AdapterTokens.of(numbers, lambda tensor: tensor)
    assert tokens is not None
    return tokens


@pytest.mark.parametrize(
    ("count", "k", "rank", "columns"),  # 390 ranks are those of two programs
    [(1, 40, 3, (0, 20)), (45, 70, 5, (0, 24, 31, 50)), (20, 32, 16, (0, 33, 40)), (9, 40, 130, (0, 24, 31, 50))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.each_value
def test_several_adapters(count: int, k: int, rank: int, columns: tuple[int, ...], dtype: torch.dtype) -> None:
    parts, n, slots = len(columns) - 1, columns[-1], 2
    weights = LoraWeights(torch.randn(slots, parts * rank, k).to(dtype), torch.randn(slots, rank, n).to(dtype), columns)
    tokens, x, y = tokens_of(count, slots), torch.randn(count, k + 4).to(dtype)[:, 4:], torch.randn(count, n).to(dtype)
    want, before = y.double(), y.clone()
    TorchLora().add(want, x.double(), LoraWeights(weights.a.double(), weights.b.double(), columns), tokens)
    TritonLora().add(y, x, weights, tokens)
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))
    assert torch.equal(y[tokens.slots < 0], before[tokens.slots < 0])


@pytest.mark.parametrize(("a_heads", "b_heads"), [(3, 1), (1, 3)])
def test_heads(a_heads: int, b_heads: int) -> None:
    count, heads, k, n, rank, slots = 19, 3, 24, 40, 5, 2
    a, b = torch.randn(slots, a_heads, rank, k), torch.randn(slots, b_heads, rank, n)
    tokens, x, y = tokens_of(count, slots), torch.randn(count, heads, k + 8)[..., 8:], torch.randn(count, heads, n + 8)
    want = y[..., :n].double()
    TorchLora().add_heads(want, x.double(), a.double(), b.double(), tokens)
    TritonLora().add_heads(y[..., :n], x, a, b, tokens)
    torch.testing.assert_close(y[..., :n].double(), want, rtol=1e-4, atol=1e-4)


def test_wrong_shapes_are_refused() -> None:
    weights = LoraWeights(torch.zeros(1, 4, 8), torch.zeros(1, 4, 6), (0, 6))
    with pytest.raises(ValueError, match="do not fit"):
        TritonLora().add(torch.zeros(2, 6), torch.zeros(2, 9), weights, tokens_of(2, 1))
