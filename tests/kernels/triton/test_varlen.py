"""Attention within runs in Triton's interpreter against its formula in float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.reference.test_varlen import compare


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_runs(dtype: torch.dtype, tolerance: float) -> None:
    compare("triton", dtype, tolerance)
