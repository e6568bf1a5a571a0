"""Packed linear layers: correct up to rounding, the same bits for a row in any batch, no reads beyond the edges."""

from __future__ import annotations

import pytest
import torch

from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.gate_form import GELU_LIMIT, GatedActivation
from moe_engine.kernels.linear.cpu import CpuLinear
from tests.kernels.cpu.conftest import threads
from tests.kernels.cpu.formulas import NAN, close, gated, normal

SHAPES = [(1, 1, 1), (3, 33, 17), (1, 64, 16), (5, 100, 250), (16, 64, 48), (29, 96, 130), (45, 31, 81), (200, 130, 70)]


@pytest.mark.parametrize(("tokens", "k", "n"), SHAPES)
def test_product_and_bias(any_library: Library, dtype: torch.dtype, tokens: int, k: int, n: int) -> None:
    linear = CpuLinear(any_library)
    x, weight, bias = normal(tokens, k, dtype=dtype), normal(n, k, dtype=dtype), normal(n, dtype=dtype)
    prepared = linear.prepare(weight, bias)
    want = x.double() @ weight.double().T
    close(linear.run(x, prepared), want + bias.double())
    close(linear.run(x, linear.prepare(weight)), want)
    assert (prepared.in_features, prepared.out_features) == (k, n)
    assert prepared.num_bytes >= weight.numel() * weight.element_size()


def test_strided_rows_next_to_nan(any_library: Library, dtype: torch.dtype) -> None:
    """Rows and weights that are slices of larger tensors: surrounding values are never used."""
    linear = CpuLinear(any_library)
    for k in (40, 45, 64):
        x = torch.full((7, 100), NAN, dtype=dtype)
        weight = torch.full((20, 80), NAN, dtype=dtype)
        x[:, 3 : 3 + k] = normal(7, k, dtype=dtype)
        weight[:, 5 : 5 + k] = normal(20, k, dtype=dtype)
        x, weight = x[:, 3 : 3 + k], weight[:, 5 : 5 + k]
        close(linear.run(x, linear.prepare(weight)), x.double() @ weight.double().T)
        close(linear.run(x.T.contiguous().T, linear.prepare(weight.T.contiguous().T)), x.double() @ weight.double().T)


def test_no_rows(library: Library, dtype: torch.dtype) -> None:
    linear = CpuLinear(library)
    assert linear.run(torch.empty(0, 8, dtype=dtype), linear.prepare(normal(5, 8, dtype=dtype))).shape == (0, 5)
    heads = linear.prepare_heads(normal(3, 5, 8, dtype=dtype))
    assert linear.run_heads(torch.empty(0, 3, 8, dtype=dtype), heads).shape == (0, 3, 5)


def test_bits_of_a_row_do_not_depend_on_the_batch(any_library: Library, dtype: torch.dtype) -> None:
    linear = CpuLinear(any_library)
    for k, n in ((2500, 200), (96, 37), (96, 150)):
        x, prepared = normal(230, k, dtype=dtype), linear.prepare(normal(n, k, dtype=dtype))
        whole = linear.run(x, prepared)
        for start, stop in ((0, 1), (5, 7), (3, 6), (10, 14), (100, 105), (7, 13), (0, 16), (1, 33), (9, 120)):
            assert torch.equal(linear.run(x[start:stop], prepared), whole[start:stop])
        with threads(1):
            assert torch.equal(linear.run(x, prepared), whole)


@pytest.mark.parametrize("tokens", [1, 13, 210])
@pytest.mark.parametrize("limit", [0.0, 0.7, -0.4, GELU_LIMIT])
def test_mlp(any_library: Library, dtype: torch.dtype, tokens: int, limit: float) -> None:
    linear = CpuLinear(any_library)
    hidden, width = 72, 112
    x = normal(tokens, hidden, dtype=dtype)
    gate, up = (normal(width, hidden, dtype=dtype, scale=0.1) for _ in range(2))
    down = normal(hidden, width, dtype=dtype, scale=0.1)
    prepared = linear.prepare(torch.cat((gate, up))), linear.prepare(down)
    got = linear.run_mlp(x, *prepared, limit)
    close(got, gated(x, gate, up, down, GatedActivation(limit)), 2)
    assert torch.equal(linear.run_mlp(x[-1:], *prepared, limit), got[-1:])
    fused = linear.fuse_mlp(*prepared, limit)
    assert fused is not None and torch.equal(fused(x), got)
    assert linear.fuse_mlp(prepared[0], linear.prepare(down, torch.ones(hidden, dtype=dtype))) is None


@pytest.mark.parametrize(("tokens", "k", "n"), [(1, 64, 32), (5, 48, 20), (130, 33, 64)])
def test_heads_by_strides(any_library: Library, dtype: torch.dtype, tokens: int, k: int, n: int) -> None:
    linear = CpuLinear(any_library)
    heads = 3
    wide = torch.full((tokens, heads, k + 9), NAN, dtype=dtype)
    wide[..., 4 : 4 + k] = normal(tokens, heads, k, dtype=dtype)
    x, weight = wide[..., 4 : 4 + k], normal(heads, n, k, dtype=dtype)
    prepared = linear.prepare_heads(weight)
    want = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    got = linear.run_heads(x, prepared)
    close(got, want)
    assert torch.equal(linear.run_heads(x[:1], prepared), got[:1])
    target = torch.full((tokens, heads, n + 7), NAN, dtype=dtype)
    linear.run_heads(x, prepared, out=target[..., :n])
    assert torch.equal(target[..., :n], got)
    assert target[..., n:].isnan().all()


def test_wrong_operands_are_refused(library: Library) -> None:
    linear = CpuLinear(library)
    prepared = linear.prepare(torch.randn(4, 6))
    with pytest.raises(ValueError, match="do not fit"):
        linear.run(torch.randn(2, 5), prepared)
    with pytest.raises(ValueError, match="do not fit"):
        linear.run(torch.randn(2, 6).bfloat16(), prepared)
    with pytest.raises(TypeError, match="float16"):
        linear.prepare(torch.randn(4, 6).half())
