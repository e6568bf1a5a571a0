"""The torch operations against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from moe_engine.kernels.ops.protocol import RouterSpec
from moe_engine.kernels.ops.reference import TorchOps
from tests.kernels import row_checks

OPS = TorchOps()
pytestmark = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@pytest.mark.parametrize("weight_dtype", [torch.float32, None])
def test_norms(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    row_checks.check_norms(OPS, dtype, weight_dtype or dtype, 64)


def test_silu_and_mul(dtype: torch.dtype) -> None:
    row_checks.check_silu_and_mul(OPS, dtype, 16)


def test_clamped_silu(dtype: torch.dtype) -> None:
    row_checks.check_clamped_silu(OPS, dtype)
    row_checks.check_shifted_silu(OPS, dtype)
    row_checks.check_situ(OPS, dtype)
    row_checks.check_squared_relu(OPS, dtype)


def test_given_experts(dtype: torch.dtype) -> None:
    row_checks.check_given_experts(OPS, dtype)


def test_zero_experts(dtype: torch.dtype) -> None:
    row_checks.check_zero_experts(OPS, dtype, 40, 24)


def test_layer_norm(dtype: torch.dtype) -> None:
    row_checks.check_layer_norm(OPS, dtype, 40, 24)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotate(dtype: torch.dtype, interleaved: bool) -> None:
    row_checks.check_rotate(OPS, dtype, 3, 8, interleaved)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_write_latent(dtype: torch.dtype, slot_dtype: torch.dtype) -> None:
    row_checks.check_write_latent(OPS, dtype, slot_dtype, padding=0)


def test_write_kv(dtype: torch.dtype) -> None:
    row_checks.check_write_kv(OPS, dtype, 8)


@pytest.mark.parametrize("spec", row_checks.ROUTERS.values(), ids=row_checks.ROUTERS.keys())
def test_route(dtype: torch.dtype, spec: RouterSpec) -> None:
    row_checks.check_route(OPS, dtype, spec, 40, 24)


def test_no_tokens(dtype: torch.dtype) -> None:
    row_checks.check_no_tokens(OPS, dtype)
