"""Error of FP8 at a long context: attention over a cache written and read in each format, against float64.

Legend: S context tokens, C latent, P rotary, H heads, G KV heads.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.attention.reference import TorchGQA, TorchMLA
from moe_engine.kernels.kv_format.formats import E4M3, E4M3_TENSOR, E5M2, STORED, head_width, latent_width
from moe_engine.kernels.kv_format.latent_records import LARGEST_E4M3
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.ops.reference import TorchOps
from moe_engine.kernels.queries import PagedQueries
from tests.kernels.cpu.formulas import attend

S = 8192
SHARPNESS = 2.0
"""Standard deviation of the scores: a few hundred tokens have weight, so that errors do not average out."""

# Relative errors of the whole output, of 24 tokens (three had up to 0.127 in E4M3). Measured over 100 seeds and these
# tests: 0.018 to 0.030, 0.017 to 0.075, 0.039 to 0.202; bfloat16 has 0.003 to 0.007.
GROUPS, BOUND = 0.06, {E4M3: 0.11, E5M2: 0.28}


def _one_request(query_len: int) -> PagedQueries:
    return PagedQueries(
        [query_len], [S], torch.zeros(1).int(), torch.tensor([0, query_len]).int(), torch.tensor([S]).int(),
        torch.randperm(S).int().unsqueeze(0), 1,
    )  # fmt: skip


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("magnitude", [1.0, 0.01, 50.0])
@pytest.mark.parametrize(("kv_dtype", "latent", "bound"), [
    (E4M3, 128, GROUPS), (E4M3, 96, BOUND[E4M3]), (E5M2, 128, BOUND[E5M2]), (E4M3_TENSOR, 128, BOUND[E4M3]),
])  # fmt: skip
def test_mla(kv_dtype: str, latent: int, bound: float, magnitude: float) -> None:
    """`magnitude`: scale of the latent, as with a small or large norm weight. A tensor has a random scale with room for
    its largest number."""
    rotary, heads, tokens = 32, 4, 24
    queries = _one_request(tokens)
    weight = (torch.rand(latent) + 0.5) * magnitude
    kv_a = torch.randn(S, latent + rotary)
    kv_a[:, latent:] *= 4
    flat = torch.cat((torch.ones(1, rotary // 2), torch.zeros(1, rotary // 2)), 1)
    slots = queries.slot_table[0].long()
    cache = torch.zeros(S, latent_width(kv_dtype, latent, rotary), dtype=getattr(torch, STORED[kv_dtype][0]))
    write = (kv_a, weight, 1e-6, torch.zeros(S).long(), RotaryTable(flat, True), slots)
    exact = kv_a.double()
    exact[:, :latent] *= torch.rsqrt(exact[:, :latent].square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    divisor = float(exact.abs().max()) / LARGEST_E4M3 * random.uniform(1, 4) if kv_dtype == E4M3_TENSOR else 1.0
    TorchOps().write_latent(*write, cache, divisor)
    q = SHARPNESS * torch.randn(tokens, heads, latent + rotary)
    q[..., :latent] /= magnitude
    q[..., latent:] /= 4
    scale = (latent + rotary) ** -0.5
    keys = exact.unsqueeze(1)
    want = attend(q, keys, keys[..., :latent], scale)
    got = TorchMLA().absorbed(q, cache, queries, scale * divisor, None, latent) * divisor
    error = _error(got, want)
    assert 1e-4 < error < bound, error


@pytest.mark.parametrize("magnitude", [1.0, 0.01, 50.0])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
def test_gqa(kv_dtype: str, magnitude: float) -> None:
    groups, width, tokens = 2, 64, 24
    queries = _one_request(tokens)
    k, v = torch.randn(S, groups, width), torch.randn(S, groups, width) * magnitude
    shape, stored = (S, groups, head_width(kv_dtype, width)), getattr(torch, STORED[kv_dtype][0])
    keys, values = torch.zeros(shape, dtype=stored), torch.zeros(shape, dtype=stored)
    TorchOps().write_kv(k, v, queries.slot_table[0], keys, values)
    q = SHARPNESS * torch.randn(tokens, 2 * groups, width)
    want = attend(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), width**-0.5)
    error = _error(TorchGQA().paged(q, keys, values, queries, width**-0.5, None), want)
    assert 1e-4 < error < BOUND[kv_dtype], error
