"""Rows of n-gram tables in Triton, under the interpreter, against torch (tests/models/test_deepseek_v41.py compares
that with float64)."""

from __future__ import annotations

import random

import pytest
import torch

from moe_engine.kernels.ops import ngram_rows
from moe_engine.kernels.ops.ngram_rows import IMAGE, OUTSIDE, SCALED, NgramTokens
from tests.kernels.drawn import late_residual, late_weights

triton_ngrams = pytest.importorskip("moe_engine.kernels.ops.triton_ngrams", reason="needs triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("each", [1, 3], ids=["prompts", "drafts"])
def test_ids_of_n_grams(each: int, dtype: torch.dtype) -> None:
    """Tokens before the step, in it, and before the first token; images between them."""
    lens = [(4, 9), (1, 1), (5, 5), (2, 8), (1, 7)] if each == 1 else [(3, 9), (3, 3), (3, 4)]
    size, count, vocab = len(lens), 4, 30
    table = torch.randperm(12 * 64, dtype=torch.int32)[: 6 * 16].view(6, 16)
    rows = torch.randperm(6)[:size].int()
    counts = torch.tensor([new for new, _ in lens])
    positions = torch.cat([torch.arange(seen - new, seen) for new, seen in lens])
    of_token = rows.repeat_interleave(counts)
    slots = table[of_token.long(), positions].long()
    tokens = NgramTokens(
        torch.randint(IMAGE, vocab, (len(positions),)), positions, slots, rows if each > 1 else of_token, each, table
    )
    tokens.ids[0] = IMAGE
    numbers, before = torch.randint(0, 9, (vocab,), dtype=torch.int32), torch.randn(len(positions), 40).to(dtype)
    whole = torch.randint(0, 99, (12 * 64, 3), dtype=torch.int32)
    whole[torch.rand(len(whole)) < 0.2] = OUTSIDE
    caches, residuals = [whole.clone()[:, 1] for _ in range(2)], [before.clone() for _ in range(2)]
    for put, cache, residual in zip((ngram_rows.put_ids, triton_ngrams.put_ids), caches, residuals):
        put(tokens, numbers, 77, cache, residual, count)
    assert torch.equal(*caches)
    assert torch.equal(*(residual.view(torch.int32) for residual in residuals))
    assert not torch.equal(residuals[0], before)


@pytest.mark.parametrize("scaled", [True, False], ids=["fp8", "fp32"])
def test_numbers_of_rows(scaled: bool) -> None:
    tokens, columns, width = 3, 5, 2 * SCALED
    rows, scales = torch.randn(tokens, columns, width), None
    if scaled:
        rows = rows.to(torch.float8_e4m3fn)
        scales = torch.randint(100, 140, (tokens, columns, width // SCALED), dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        found = triton_ngrams.values(rows, scales, dtype)
        assert torch.equal(found, ngram_rows.values(rows, scales, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("n", "width"), [(4, 70), (2, 1100), (3, 64)])
def test_rows_are_added_to_streams(n: int, width: int, dtype: torch.dtype) -> None:
    """With and without a result that is added first; several iterations over the channels."""
    tokens, bound = random.randint(1, 3), 2e-2 if dtype == torch.bfloat16 else 1e-5
    before, streams = late_residual(n, width, tokens).to(dtype), late_weights(n, width)[0]
    found, weights = torch.randn(tokens, (n + 1) * width).to(dtype), torch.rand(n, width) + 0.5
    ids = torch.tensor([7, OUTSIDE, 3], dtype=torch.int32)[:tokens, None].expand(-1, 4)
    for x in (None, torch.randn(tokens, width).to(dtype)):
        one, other = before.clone(), before.clone()
        ngram_rows.add(found, ids, x, one, weights, streams)
        triton_ngrams.add(found, ids, x, other, weights, streams)
        torch.testing.assert_close(other, one, rtol=bound, atol=bound)
        assert not torch.equal(one[0], before[0]) and (x is not None or torch.equal(one[1:2], before[1:2]))


@pytest.mark.parametrize("width", [64, 300, 5120])
def test_no_channel_has_two_threads(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams change in place and are summed: a second thread would read the first one's result."""
    from triton.runtime import JITFunction
    from triton.runtime.interpreter import InterpretedFunction

    found: list[tuple[int, int]] = []
    for kind in (InterpretedFunction, JITFunction):  # the latter on a GPU
        monkeypatch.setattr(kind, "run", lambda kernel, *args, **more: found.append((more["BLOCK"], more["num_warps"])))
    residual, streams = late_residual(2, width, 1), late_weights(2, width)[0]
    ids, x, weights = torch.tensor([[7] * 4], dtype=torch.int32), torch.randn(1, width), torch.rand(2, width)
    triton_ngrams.add(torch.randn(1, 3 * width), ids, x, residual, weights, streams)
    assert found and all(block >= 32 * warps for block, warps in found)
