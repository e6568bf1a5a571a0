"""A tensor with one value that is no number is found, in every dtype and layout."""

from __future__ import annotations

import random

import pytest
import torch

from moe_engine.models.finite import is_finite

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, *FP8])
def test_one_wrong_value_is_found(dtype: torch.dtype) -> None:
    rows, columns = random.randint(1, 9), random.randint(2, 70)
    if dtype in FP8:  # all values that are numbers
        codes = torch.arange(256, dtype=torch.uint8).view(dtype)
        good = codes[torch.isfinite(codes.float())].repeat(2).unsqueeze(0)
    else:
        good = (torch.randn(rows, columns) * torch.finfo(dtype).max / 8).clamp(-6e4, 6e4).to(dtype)
    assert is_finite(good) and is_finite(good[:, 1:]) and is_finite(good[:0])
    for wrong in (float("nan"), float("inf"), -float("inf")):
        value = torch.tensor(wrong).to(dtype)
        bad = good.clone()
        bad[random.randrange(len(bad)), random.randrange(bad.shape[1])] = value
        assert is_finite(bad) == bool(torch.isfinite(value.float())), wrong
        assert is_finite(bad.T) == is_finite(bad)
    assert is_finite(torch.tensor([1 << 60])) and is_finite(torch.zeros(3, dtype=torch.uint8))
