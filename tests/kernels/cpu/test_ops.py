"""The small operations against their formulas, with weights that are not 1, odd widths and strided views."""

from __future__ import annotations

import pytest
import torch

from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.ops.cpu import CpuOps
from moe_engine.kernels.ops.protocol import RouterSpec
from tests.kernels.cpu.conftest import threads
from tests.kernels.cpu.formulas import NAN, close, normal, rms_norm, routed_weights, silu
from tests.kernels.row_checks import (
    check_clamped_silu,
    check_given_experts,
    check_no_tokens,
    check_rotate,
    check_silu_of_extreme_values,
    check_write_latent,
)

EPS = 1e-5


@pytest.mark.parametrize("width", [1, 15, 64, 100, 1024])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_norms(any_library: Library, dtype: torch.dtype, weight_dtype: torch.dtype, width: int) -> None:
    ops = CpuOps(any_library)
    x, weight = normal(70, width, dtype=dtype, scale=3), normal(width, dtype=weight_dtype) + 1
    got = ops.rms_norm(x, weight, EPS)
    close(got, rms_norm(x, weight, EPS), 2)
    assert torch.equal(ops.rms_norm(x[5:6], weight, EPS), got[5:6])
    wide = torch.full((70, width + 3), NAN, dtype=dtype)
    wide[:, 2 : 2 + width] = x
    assert torch.equal(ops.rms_norm(wide[:, 2 : 2 + width], weight, EPS), got)
    assert torch.equal(ops.rms_norm(x.view(7, 10, width), weight, EPS), got.view(7, 10, width))
    with threads(1):
        assert torch.equal(ops.rms_norm(x, weight, EPS), got)
    residual, before = normal(70, width, dtype=dtype), x.clone()
    total = residual + x
    got = ops.add_rms_norm(wide[:, 2 : 2 + width], residual, weight, EPS)
    assert torch.equal(residual, total)
    assert torch.equal(x, before)
    assert torch.equal(got, ops.rms_norm(total, weight, EPS))


@pytest.mark.parametrize("width", [1, 16, 45, 512])
def test_silu_and_mul(any_library: Library, dtype: torch.dtype, width: int) -> None:
    ops = CpuOps(any_library)
    x = normal(33, 2 * width, dtype=dtype, scale=4)
    got = ops.silu_and_mul(x)
    close(got, silu(x[:, :width].double()) * x[:, width:].double())
    assert torch.equal(ops.silu_and_mul(x[7:8]), got[7:8])


def test_silu_of_extreme_values(library: Library) -> None:
    check_silu_of_extreme_values(CpuOps(library))


def test_clamped_silu(any_library: Library, dtype: torch.dtype) -> None:
    check_clamped_silu(CpuOps(any_library), dtype)


def test_given_experts(any_library: Library) -> None:
    check_given_experts(CpuOps(any_library))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("width", [64, 32, 12, 80])
def test_rotate(any_library: Library, dtype: torch.dtype, width: int, interleaved: bool) -> None:
    check_rotate(CpuOps(any_library), dtype, 2, width, interleaved)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_write_latent(any_library: Library, dtype: torch.dtype, slot_dtype: torch.dtype) -> None:
    check_write_latent(CpuOps(any_library), dtype, slot_dtype, padding=0)


def test_write_kv(library: Library, dtype: torch.dtype) -> None:
    qkv = normal(6, 5, 24, dtype=dtype)
    k, v, slots = qkv[:, 1:3], qkv[:, 3:5], torch.randperm(20)[:6].int()
    k_cache, v_cache = (torch.full((20, 2, 24), NAN, dtype=dtype) for _ in range(2))
    CpuOps(library).write_kv(k, v, slots, k_cache, v_cache)
    assert torch.equal(k_cache[slots.long()], k)
    assert torch.equal(v_cache[slots.long()], v)
    assert k_cache.isnan().all(-1).all(-1).sum() == 14


ROUTERS = {
    "v3": RouterSpec(32, 6, "sigmoid", True, 8, 4, "top2", True, 2.5),
    "v3 one group": RouterSpec(30, 4, "sigmoid", True, 1, 1, "top2", True, 2.5),
    "v2": RouterSpec(40, 6, "softmax", False, 8, 3, "max", False, 16.0),
    "v2 lite": RouterSpec(64, 6, "softmax"),
    "mixtral": RouterSpec(8, 2, "softmax", renormalize=True),
    "gpt-oss": RouterSpec(32, 4, "softmax", True, renormalize=True, bias_on_logits=True),
    "v4": RouterSpec(32, 6, "sqrtsoftplus", True, renormalize=True, scale=1.5),
    "all experts": RouterSpec(5, 5, "sigmoid", renormalize=True),
}


@pytest.mark.parametrize("spec", ROUTERS.values(), ids=ROUTERS.keys())
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (37, 100)])
def test_route(any_library: Library, dtype: torch.dtype, spec: RouterSpec, tokens: int, width: int) -> None:
    ops = CpuOps(any_library)
    x, gate = normal(tokens, width, dtype=dtype), torch.randn(spec.num_experts, width) / width**0.5
    bias = torch.randn(spec.num_experts) - 1.0  # mostly negative: a mask of 0 would choose the wrong experts
    weights, ids = ops.route(x, gate, bias, spec)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    got = torch.zeros(tokens, spec.num_experts).scatter_(-1, ids.long(), weights)
    close(got, routed_weights(x, gate, bias, spec), 2)
    choice = got.scatter(-1, ids.long(), 1.0).sum(-1)
    assert torch.equal(choice, got.bool().float().sum(-1).clamp_(min=spec.top_k))
    for token in range(0, tokens, 7):
        one = ops.route(x[token : token + 1], gate, bias, spec)
        assert torch.equal(one[0], weights[token : token + 1])
        assert torch.equal(one[1], ids[token : token + 1])
    with threads(1):
        again = ops.route(x, gate, bias, spec)
    assert torch.equal(again[0], weights)
    narrow = ops.prepare_gate(gate.to(torch.bfloat16))
    assert narrow.dtype == torch.bfloat16, "as stored"
    for found, wide in zip(ops.route(x, narrow, bias, spec), ops.route(x, narrow.float(), bias, spec)):
        assert torch.equal(found, wide), "a bf16 gate has the bits of its values in float32"


def test_no_tokens(library: Library, dtype: torch.dtype) -> None:
    check_no_tokens(CpuOps(library), dtype)
