"""MLA in the expanded form and merging of chunks, under the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.queries import AttentionBatch
from tests.kernels.cpu.formulas import close, expanded_attention, normal, paged_queries, random_trees

triton_attention = pytest.importorskip("moe_engine.kernels.attention.triton.attention", reason="needs triton")
TritonMLA = triton_attention.TritonMLA

LENS = [(1, 1), (130, 130), (0, 4), (37, 300), (1, 65), (70, 200)]
BF16, FP32 = torch.bfloat16, torch.float32


def keys_of(kv: Tensor, rope: Tensor, nope: int) -> Tensor:
    return torch.cat((kv[..., :nope], rope.unsqueeze(1).expand(-1, kv.shape[1], -1)), -1)


@pytest.mark.parametrize(
    ("nope", "rotary", "value", "dtype"), [(128, 64, 128, BF16), (32, 16, 48, BF16), (21, 10, 19, FP32)]
)
def test_expanded(nope: int, rotary: int, value: int, dtype: torch.dtype) -> None:
    """Relative to the largest value: 1.2e-2 in bf16 (weights and output are rounded), 6e-6 in fp32."""
    mla = TritonMLA()
    queries, _ = paged_queries(LENS)
    context = queries.num_context_tokens
    q = normal(queries.num_tokens, 3, nope + rotary, dtype=dtype)
    kv = torch.full((context + 1, 4, nope + value), float("nan"), dtype=dtype)
    kv[:context, 1:] = normal(context, 3, nope + value, dtype=dtype)
    rope = torch.full((context + 1, rotary + 6), float("nan"), dtype=dtype)
    rope[:context, 3 : 3 + rotary] = normal(context, rotary, dtype=dtype)
    kv, rope = kv[:context, 1:], rope[:context, 3 : 3 + rotary]  # strided, with NaN around
    for _ in range(2):  # the second time with a plan made before the call
        plan = mla.plan(AttentionBatch(None, queries))
        got = mla.expanded(q, kv, rope, queries, 0.1, plan)
        close(got, expanded_attention(q, kv, rope, queries, 0.1), 2)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_parts_and_their_log_sum_exps(dtype: torch.dtype) -> None:
    """A context expanded in three parts, one after all query tokens of some requests, gives the result of the whole."""
    mla = TritonMLA()
    lens = [(5, 5), (40, 90), (1, 130), (33, 64)]
    queries, _ = paged_queries(lens)
    context = queries.num_context_tokens
    nope, rotary, value, heads = 16, 8, 24, 2
    q = normal(queries.num_tokens, heads, nope + rotary, dtype=dtype)
    kv, rope = normal(context, heads, nope + value, dtype=dtype), normal(context, rotary, dtype=dtype)
    starts = torch.tensor([0, *queries.context_lens]).cumsum(0).tolist()
    out = lse = None
    for begin, stop in ((0, 48), (48, 71), (71, 130)):
        first = [min(begin, c) for c in queries.context_lens]
        count = [min(stop, c) - f for c, f in zip(queries.context_lens, first)]
        rows = torch.cat([torch.arange(s + f, s + f + n) for s, f, n in zip(starts, first, count)])
        part, part_lse = mla.expanded_chunk(q, kv[rows], rope[rows], 0.3, mla.plan_chunk(queries, first, count))
        if out is None or lse is None:
            out, lse = part, part_lse
        else:
            mla.merge_chunks(out, lse, part, part_lse)
    assert out is not None and lse is not None
    close(out, expanded_attention(q, kv, rope, queries, 0.3), 3)
    token = 0
    for request, (num_queries, num_keys) in enumerate(lens):
        keys = keys_of(kv, rope, nope)[starts[request] : starts[request + 1]].double()
        scores = torch.einsum("thd,shd->ths", q[token : token + num_queries].double(), keys) * 0.3
        hidden = torch.arange(num_keys)[None, :] > torch.arange(num_keys - num_queries, num_keys)[:, None]
        expected = scores.masked_fill(hidden[:, None], -torch.inf).logsumexp(-1)
        torch.testing.assert_close(lse[token : token + num_queries].double(), expected, rtol=1e-5, atol=1e-5)
        token += num_queries


def test_a_part_that_nobody_sees_is_nothing() -> None:
    mla = TritonMLA()
    queries, _ = paged_queries([(3, 9)])
    q = normal(3, 2, 24, dtype=FP32)
    kv, rope = normal(4, 2, 40, dtype=FP32), normal(4, 8, dtype=FP32)
    out, lse = mla.expanded_chunk(q, kv, rope, 1.0, mla.plan_chunk(queries, [9], [4]))
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_trees_are_refused() -> None:
    queries, _ = random_trees(paged_queries([(3, 9)])[0])
    with pytest.raises(ValueError, match="expanded"):
        TritonMLA().expanded(torch.zeros(3, 2, 96), torch.zeros(9, 2, 64), torch.zeros(9, 64), queries, 1.0, None)
