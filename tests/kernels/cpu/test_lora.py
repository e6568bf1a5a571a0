"""LoRA products: every row against float64, for tokens of several adapters and of none, with shared and separate
prefixes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.lora.cpu import CpuLora
from moe_engine.kernels.lora.protocol import AdapterTokens, LoraKernel, LoraWeights
from moe_engine.kernels.lora.reference import TorchLora
from tests.kernels.cpu.formulas import close, normal

SHAPES = [(1, 1, 1, (0, 3)), (9, 33, 5, (0, 17, 40)), (40, 64, 16, (0, 48, 56, 64)), (70, 130, 3, (0, 700))]


def tokens_of(count: int, slots: int) -> AdapterTokens | None:
    numbers = torch.randint(-1, slots, (count,)).numpy()
    numbers[0] = slots - 1
    return AdapterTokens.of(numbers, lambda tensor: tensor)


class Sums:
    """Rows y with products of a row, a [R, K] and b [R, N] each, in float64, and how far rounding may change them."""

    def __init__(self, y: Tensor) -> None:
        self.out, self._inner, self._products = y.double(), torch.zeros(y.shape).double(), torch.zeros(y.shape).double()

    def add(self, place: tuple[int | slice, ...], x: Tensor, a: Tensor, b: Tensor) -> None:
        inner = x.double() @ a.double().T
        self._products[place] = inner @ b.double()
        self._inner[place] = inner.abs() @ b.double().abs()
        self.out[place] += self._products[place]

    def check(self, got: Tensor) -> None:
        """The inner rows, their products and the sums may each be rounded to bf16."""
        if got.dtype == torch.float32:
            return close(got, self.out)
        size = self._inner + self._products.abs() + self.out.abs()
        assert ((got.double() - self.out).abs() <= size * 2**-8 * 1.02 + 1e-6).all()


def expected(y: Tensor, x: Tensor, weights: LoraWeights, tokens: AdapterTokens) -> Sums:
    sums, rank = Sums(y), weights.rank
    for t, slot in enumerate(tokens.slots):
        for p, (first, last) in enumerate(zip(weights.columns, weights.columns[1:])) if slot >= 0 else ():
            a = weights.a[slot, p * rank : (p + 1) * rank]
            sums.add((t, slice(first, last)), x[t], a, weights.b[slot, :, first:last])
    return sums


@pytest.mark.parametrize("row", ["torch", "cpu"])
@pytest.mark.parametrize(("count", "k", "rank", "columns"), SHAPES)
def test_several_adapters(
    library: Library, dtype: torch.dtype, row: str, count: int, k: int, rank: int, columns: tuple[int, ...]
) -> None:
    kernel: LoraKernel = TorchLora() if row == "torch" else CpuLora(library)
    parts, n, slots = len(columns) - 1, columns[-1], 3
    weights = LoraWeights(normal(slots, parts * rank, k, dtype=dtype), normal(slots, rank, n, dtype=dtype), columns)
    tokens = tokens_of(count, slots)
    assert tokens is not None
    x, y = normal(count, k + 7, dtype=dtype)[:, 7:], normal(count, n + 3, dtype=dtype)[:, :n]
    want, before = expected(y, x, weights, tokens), y.clone()
    kernel.add(y, x, weights, tokens)
    want.check(y)
    none = torch.from_numpy(tokens.slots < 0)
    assert torch.equal(y[none], before[none])


@pytest.mark.parametrize("row", ["torch", "cpu"])
@pytest.mark.parametrize("own", ["a", "b", "both"])
def test_heads(library: Library, dtype: torch.dtype, row: str, own: str) -> None:
    kernel: LoraKernel = TorchLora() if row == "torch" else CpuLora(library)
    count, heads, k, n, rank, slots = 37, 3, 24, 40, 5, 2
    a = normal(slots, heads if own != "b" else 1, rank, k, dtype=dtype)
    b = normal(slots, heads if own != "a" else 1, rank, n, dtype=dtype)
    tokens = tokens_of(count, slots)
    assert tokens is not None
    x, y = normal(count, heads, k + 8, dtype=dtype)[..., 8:], normal(count, heads, n + 8, dtype=dtype)[..., :n]
    want = Sums(y)
    for t, slot in enumerate(tokens.slots):
        for h in range(heads) if slot >= 0 else ():
            want.add((t, h), x[t, h], a[slot, h % a.shape[1]], b[slot, h % b.shape[1]])
    kernel.add_heads(y, x, a, b, tokens)
    want.check(y)


def test_bits_do_not_depend_on_the_batch(library: Library) -> None:
    kernel, slots, rank, k, n, dtype = CpuLora(library), 4, 6, 100, 150, torch.float32
    weights = LoraWeights(normal(slots, rank, k, dtype=dtype), normal(slots, rank, n, dtype=dtype), (0, n))
    x, y = normal(50, k, dtype=dtype), normal(50, n, dtype=dtype)
    tokens = tokens_of(50, slots)
    assert tokens is not None
    alone = []
    for t in range(50):
        row, one = y[t : t + 1].clone(), tokens.part(slice(t, t + 1))
        if one is not None:
            kernel.add(row, x[t : t + 1], weights, one)
        alone.append(row)
    kernel.add(y, x, weights, tokens)
    assert torch.equal(y, torch.cat(alone))


def test_contexts_have_the_adapters_of_their_requests() -> None:
    tokens = AdapterTokens.of(np.array([0, 0, -1, 2]), lambda tensor: tensor)
    assert tokens is not None and AdapterTokens.of(np.array([-1, -1]), lambda tensor: tensor) is None
    found = tokens.of_contexts(slice(0, 4), [2, 1, 1], [3, 2, 1], 6)
    assert found is not None and found.slots.tolist() == [0, 0, 0, -1, -1, 2]
    shared = tokens.of_contexts(slice(0, 2), [1, 1], [4, 4], 5)  # a shared prefix is gathered once
    assert shared is not None and shared.slots.tolist() == [0] * 5
