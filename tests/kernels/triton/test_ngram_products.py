"""Products of n-gram rows in Triton, under the interpreter, against torch (tests/models/test_qwen4_exp.py compares that
with transformers)."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.delta.protocol import StateRuns
from moe_engine.kernels.ops import ngram_products as in_torch
from tests.kernels.convolutions import NUM_ROWS, decodes, drafts, prompts

triton_products = pytest.importorskip("moe_engine.kernels.ops.triton_ngram_products", reason="needs triton")
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
forms = pytest.mark.parametrize("form", [prompts, drafts, decodes], ids=lambda form: form.__name__)


@forms
@pytest.mark.parametrize("longest", [2, 3, 5])
@pytest.mark.each_value
def test_ids(form: object, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends of texts and beginnings of sequences, in a step and before it; several iterations."""
    monkeypatch.setattr(triton_products, "_TOKENS", 8)
    runs: StateRuns = form()  # type: ignore[operator]
    tokens, end = torch.randint(0, 6, (runs.num_tokens,)), 3
    tokens[random.randrange(len(tokens))] = (1 << 24) - 1
    states = torch.randint(0, 6, (NUM_ROWS, longest - 1, 1)).float()
    one, other = states.clone(), states.clone()
    want, got = in_torch.ids(tokens, one, runs, end), triton_products.ids(tokens, other, runs, end)
    assert torch.equal(want, got) and torch.equal(one, other) and not torch.equal(one, states)
    assert (want == end).any()


@dtypes
@pytest.mark.parametrize(("n", "width"), [(4, 70), (2, 600), (3, 64)])
def test_gated_products(n: int, width: int, dtype: torch.dtype) -> None:
    """Streams are a view of the residual; also exactly, in float64."""
    tokens, bound = random.randint(1, 3), 2e-2 if dtype == torch.bfloat16 else 2e-5
    streams = torch.randn(tokens, n * (width + 1)).to(dtype)[:, : n * width]
    found, weights, norm = torch.randn(tokens, (n + 1) * width).to(dtype), torch.randn(n, width), torch.rand(n, width)
    want = in_torch.gate(streams, found, weights, norm, 1e-5)
    for one, other in zip(want, triton_products.gate(streams, found, weights, norm, 1e-5)):
        torch.testing.assert_close(other, one, rtol=bound, atol=bound)
    x, keys, value = streams.double(), found.double()[:, : n * width], found.double()[:, n * width :]
    x, keys = x.unflatten(1, (n, width)), keys.unflatten(1, (n, width))
    rms = ((x.square().mean(2) + 1e-5) * (keys.square().mean(2) + 1e-5)).sqrt()
    dot = (x * weights * keys).sum(2) / rms / width**0.5
    exact = (dot.sign() * dot.abs().sqrt()).sigmoid().unsqueeze(2) * value.unsqueeze(1)
    torch.testing.assert_close(want[0].double(), exact.flatten(1), rtol=bound, atol=bound)


@dtypes
@forms
@pytest.mark.parametrize(("taps", "apart"), [(4, 3), (2, 2), (3, 4)])
@pytest.mark.each_value
def test_mixed_products(form: object, taps: int, apart: int, dtype: torch.dtype) -> None:
    runs: StateRuns = form()  # type: ignore[operator]
    tokens, wide, bound = runs.num_tokens, random.choice((90, 1100)), 2e-2 if dtype == torch.bfloat16 else 1e-5
    gated, normed = (torch.randn(tokens, wide).to(dtype) for _ in range(2))
    kept = torch.randn(NUM_ROWS, (taps - 1) * apart, wide).to(dtype)
    residual, weights = torch.randn(tokens, wide + 4).to(dtype), torch.randn(taps, wide)
    states: list[Tensor] = [kept.clone(), kept.clone()]
    summed = [residual.clone(), residual.clone()]
    for kernels, state, rows in zip((in_torch.IN_TORCH, triton_products.TRITON), states, summed):
        kernels.mix(gated, normed, state, weights, runs, rows, apart)
    assert torch.equal(*states) and not torch.equal(states[0], kept)
    torch.testing.assert_close(summed[1], summed[0], rtol=bound, atol=bound)
    assert torch.equal(summed[1][:, wide:], residual[:, wide:])


def test_no_tokens() -> None:
    """Of an idle attention group."""
    none = torch.zeros(0, dtype=torch.int64)
    runs = StateRuns([], torch.zeros(1, dtype=torch.int32), none, [], none)
    rows = torch.zeros(0, 12)
    assert triton_products.ids(none, torch.zeros(2, 2, 1), runs, 1).shape == (0, 3)
    gated, normed = triton_products.gate(rows[:, :8], rows, torch.ones(2, 4), torch.ones(2, 4), 1e-5)
    triton_products.mix(gated, normed, torch.zeros(2, 3, 8), torch.ones(2, 8), runs, rows, 3)
    assert gated.shape == normed.shape == (0, 8)
