"""The small operations against their formulas, with weights that are not 1, odd widths and strided views."""

from __future__ import annotations

import pytest
import torch

from moe_engine.kernels.cpu.library import PATHS, Library
from moe_engine.kernels.ops.cpu import CpuOps
from moe_engine.kernels.ops.protocol import RouterSpec
from tests.kernels import row_checks
from tests.kernels.clear_choices import draw_clear
from tests.kernels.cpu.conftest import threads
from tests.kernels.cpu.formulas import NAN, close, normal
from tests.kernels.row_checks import ROUTERS

EPS = 1e-5


@pytest.mark.parametrize("width", [1, 15, 64, 100, 1024])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_norms(any_library: Library, dtype: torch.dtype, weight_dtype: torch.dtype, width: int) -> None:
    ops = CpuOps(any_library)
    row_checks.check_norms(ops, dtype, weight_dtype, width)
    x, weight = normal(70, width, dtype=dtype, scale=3), normal(width, dtype=weight_dtype) + 1
    got = ops.rms_norm(x, weight, EPS)
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
    row_checks.check_silu_and_mul(ops, dtype, width)
    x = normal(33, 2 * width, dtype=dtype, scale=4)
    assert torch.equal(ops.silu_and_mul(x[7:8]), ops.silu_and_mul(x)[7:8])


def test_silu_of_extreme_values(library: Library) -> None:
    row_checks.check_silu_of_extreme_values(CpuOps(library))


def test_clamped_silu(any_library: Library, dtype: torch.dtype) -> None:
    row_checks.check_clamped_silu(CpuOps(any_library), dtype)
    row_checks.check_shifted_silu(CpuOps(any_library), dtype)
    row_checks.check_situ(CpuOps(any_library), dtype)
    row_checks.check_squared_relu(CpuOps(any_library), dtype)


def test_given_experts(any_library: Library, dtype: torch.dtype) -> None:
    row_checks.check_given_experts(CpuOps(any_library), dtype)


@pytest.mark.parametrize(("tokens", "width"), [(1, 70), (90, 128)])
def test_zero_experts(any_library: Library, dtype: torch.dtype, tokens: int, width: int) -> None:
    row_checks.check_zero_experts(CpuOps(any_library), dtype, tokens, width)


@pytest.mark.parametrize(("tokens", "width"), [(1, 70), (90, 128), (2, 7)])
def test_layer_norm(any_library: Library, dtype: torch.dtype, tokens: int, width: int) -> None:
    row_checks.check_layer_norm(CpuOps(any_library), dtype, tokens, width)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("width", [64, 32, 12, 80])
def test_rotate(any_library: Library, dtype: torch.dtype, width: int, interleaved: bool) -> None:
    row_checks.check_rotate(CpuOps(any_library), dtype, 2, width, interleaved)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_write_latent(any_library: Library, dtype: torch.dtype, slot_dtype: torch.dtype) -> None:
    row_checks.check_write_latent(CpuOps(any_library), dtype, slot_dtype, padding=0)


def test_write_kv(library: Library, dtype: torch.dtype) -> None:
    row_checks.check_write_kv(CpuOps(library), dtype, 24)


@pytest.mark.parametrize("spec", ROUTERS.values(), ids=ROUTERS.keys())
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (37, 100), (150, 96)])
def test_route(any_library: Library, dtype: torch.dtype, spec: RouterSpec, tokens: int, width: int) -> None:
    ops = CpuOps(any_library)
    row_checks.check_route(ops, dtype, spec, tokens, width)
    x, gate = normal(tokens, width, dtype=dtype), torch.randn(spec.num_experts, width) / width**0.5
    bias = torch.randn(spec.num_experts) - 1.0
    narrow = ops.prepare_gate(gate.to(torch.bfloat16))
    assert narrow.dtype == torch.bfloat16, "as stored"
    draw_clear(x, narrow, bias, spec)  # products of pairs of its numbers are compared with others
    for form in (gate, narrow):
        weights, ids = ops.route(x, form, bias, spec)
        for token in range(0, tokens, 7):
            one = ops.route(x[token : token + 1], form, bias, spec)
            assert torch.equal(one[0], weights[token : token + 1])
            assert torch.equal(one[1], ids[token : token + 1])
        with threads(1):
            again = ops.route(x, form, bias, spec)
        assert torch.equal(again[0], weights)
    wide = ops.route(x, narrow.float(), bias, spec)
    if any_library.path in (PATHS[3], PATHS[2]) and dtype == torch.bfloat16:  # products of pairs
        dense = [torch.zeros(tokens, spec.num_experts).scatter_(-1, ids.long(), w) for w, ids in ((weights, ids), wide)]
        close(dense[0], dense[1].double(), 4)
    else:
        assert torch.equal(weights, wide[0]), "a bf16 gate has the bits of its values in float32"


def test_no_tokens(library: Library, dtype: torch.dtype) -> None:
    row_checks.check_no_tokens(CpuOps(library), dtype)
