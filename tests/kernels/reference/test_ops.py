"""The torch operations against one-token-at-a-time formulas in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.ops.protocol import RotaryTable, RouterSpec
from moe_engine.kernels.ops.reference import TorchOps
from tests.kernels.row_checks import check_clamped_silu, check_given_experts

OPS = TorchOps()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 2e-2


def naive_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, None])
def test_rms_norm(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    x, weight = rand(5, 3, 64, dtype=dtype)[:, 1], 1 + 0.1 * rand(64, seed=1).to(weight_dtype or dtype)
    got = OPS.rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), naive_norm(x, weight, 1e-5), rtol=tolerance(dtype), atol=tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_updates_the_residual(dtype: torch.dtype) -> None:
    x, residual, weight = rand(5, 64, dtype=dtype), rand(5, 64, dtype=dtype, seed=1), 1 + 0.1 * rand(64, seed=2)
    total = x + residual
    got = OPS.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    torch.testing.assert_close(
        got.double(), naive_norm(total, weight, 1e-6), rtol=tolerance(dtype), atol=tolerance(dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    x = rand(7, 32, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    want = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(OPS.silu_and_mul(x).double(), want, rtol=tolerance(dtype), atol=tolerance(dtype))


def test_clamped_silu_and_given_experts() -> None:
    check_clamped_silu(OPS, torch.float32)
    check_given_experts(OPS)


def table(width: int, interleaved: bool, positions: int = 50) -> RotaryTable:
    angles = torch.arange(positions).unsqueeze(1) * 100.0 ** (-torch.arange(width // 2) / (width // 2))
    return RotaryTable(torch.cat((angles.cos(), angles.sin()), 1), interleaved)


def naive_rotate(vector: Tensor, position: int, rotary: RotaryTable) -> Tensor:
    half = rotary.width // 2
    out = vector.double().clone()
    for j in range(half):
        i, k = (2 * j, 2 * j + 1) if rotary.interleaved else (j, j + half)
        cos, sin = rotary.cos_sin[position, j].item(), rotary.cos_sin[position, half + j].item()
        a, b = vector[i].item(), vector[k].item()
        out[i], out[k] = a * cos - b * sin, a * sin + b * cos
    return out


@pytest.mark.parametrize(("interleaved", "leading"), list(itertools.product([True, False], repeat=2)))
def test_rotate_in_place_on_a_view(interleaved: bool, leading: bool) -> None:
    rotary, positions = table(8, interleaved), torch.tensor([0, 7, 49])
    whole = rand(3, 5, 20)
    x, before = whole[:, 1:4], whole.clone()
    (OPS.rotate_leading if leading else OPS.rotate)(x, positions, rotary)
    span = slice(0, 8) if leading else slice(12, 20)
    kept = slice(8, 20) if leading else slice(0, 12)
    assert torch.equal(whole[:, [0, 4]], before[:, [0, 4]]) and torch.equal(whole[..., kept], before[..., kept])
    for t, h in itertools.product(range(3), range(1, 4)):
        want = naive_rotate(before[t, h, span], int(positions[t]), rotary)
        torch.testing.assert_close(whole[t, h, span].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_write_latent(slot_dtype: torch.dtype) -> None:
    rotary, positions = table(4, True), torch.tensor([3, 11])
    whole, weight = rand(2, 30), 1 + 0.1 * rand(12, seed=1)
    kv_a, before = whole[:, 14:], whole.clone()
    cache = torch.full((6, 16), -1.0)
    OPS.write_latent(kv_a, weight, 1e-6, positions, rotary, torch.tensor([5, 2], dtype=slot_dtype), cache)
    assert torch.equal(whole, before) and (cache[[0, 1, 3, 4]] == -1).all()
    for t, slot in enumerate((5, 2)):
        want = torch.cat(
            (naive_norm(kv_a[t, :12], weight, 1e-6), naive_rotate(kv_a[t, 12:], int(positions[t]), rotary))
        )
        torch.testing.assert_close(cache[slot].double(), want, rtol=1e-5, atol=1e-5)


def test_write_kv_of_strided_views() -> None:
    qkv = rand(3, 6, 8)
    k_cache, v_cache = torch.zeros(10, 2, 8), torch.zeros(10, 2, 8)
    OPS.write_kv(qkv[:, 2:4], qkv[:, 4:], torch.tensor([9, 0, 4], dtype=torch.int32), k_cache, v_cache)
    assert torch.equal(k_cache[[9, 0, 4]], qkv[:, 2:4]) and torch.equal(v_cache[[9, 0, 4]], qkv[:, 4:])
    assert (k_cache[[1, 2, 3, 5, 6, 7, 8]] == 0).all()


def naive_route(x: Tensor, gate: Tensor, bias: Tensor | None, spec: RouterSpec) -> tuple[list[float], list[int]]:
    """One token, by the definition (float64)."""
    logits = (gate.double() @ x.double()).tolist()
    if spec.score == "sigmoid":
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    elif spec.score == "sqrtsoftplus":
        scores = [math.sqrt(math.log1p(math.exp(v))) for v in logits]
    else:
        total = sum(math.exp(v) for v in logits)
        scores = [math.exp(v) / total for v in logits]
    choice = [s + (0.0 if bias is None else bias[e].item()) for e, s in enumerate(scores)]
    size = spec.num_experts // spec.num_groups
    groups = [choice[g * size : (g + 1) * size] for g in range(spec.num_groups)]
    rank = [sum(sorted(g)[-2:]) if spec.group_score == "top2" else max(g) for g in groups]
    kept = sorted(range(spec.num_groups), key=lambda g: -rank[g])[: spec.topk_groups]
    allowed = [e for e in range(spec.num_experts) if spec.group_score is None or e // size in kept]
    ids = sorted(allowed, key=lambda e: -choice[e])[: spec.top_k]
    weights = [scores[e] for e in ids]
    if spec.renormalize:
        weights = [w / (sum(weights) + 1e-20) for w in weights]
    return [w * spec.scale for w in weights], ids


SPECS = [
    RouterSpec(16, 4, "sigmoid", True, 4, 2, "top2", True, 2.5),
    RouterSpec(16, 4, "sigmoid", True, 1, 1, "top2", True, 1.0),
    RouterSpec(16, 3, "softmax", False, 4, 2, "max", False, 16.0),
    RouterSpec(16, 6, "softmax", False, 1, 1, None, False, 1.0),
    RouterSpec(8, 2, "softmax", False, 1, 1, None, True, 1.0),
    RouterSpec(8, 8, "sigmoid", True, 1, 1, None, True, 1.0),
    RouterSpec(16, 3, "sqrtsoftplus", True, 1, 1, None, True, 1.5),
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_route(spec: RouterSpec, dtype: torch.dtype) -> None:
    x, gate = rand(40, 24, dtype=dtype), rand(spec.num_experts, 24, seed=1)
    bias = rand(spec.num_experts, seed=2) - 1.0 if spec.has_bias else None  # negative: a mask of 0 would win
    weights, ids = OPS.route(x, gate, bias, spec)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32 and ids.shape == (40, spec.top_k)
    for t in range(40):
        want_weights, want_ids = naive_route(x[t], gate, bias, spec)
        assert sorted(ids[t].tolist()) == sorted(want_ids)
        by_id = dict(zip(ids[t].tolist(), weights[t].tolist()))
        assert [by_id[e] for e in want_ids] == pytest.approx(want_weights, rel=1e-4)


def test_no_tokens() -> None:
    assert OPS.route(rand(0, 24), rand(16, 24), rand(16), SPECS[0])[1].shape == (0, 4)
    assert OPS.rms_norm(rand(0, 8), rand(8), 1e-6).shape == (0, 8)
    OPS.rotate(rand(0, 2, 8), torch.empty(0, dtype=torch.int64), table(8, True))
