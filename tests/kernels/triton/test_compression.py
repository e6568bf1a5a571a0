"""Compressed entries in Triton's interpreter against transformers' compressors of DeepSeek V4."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.reference.test_compression import SHAPES, Case, check, kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.each_value
def test_entries(shape: tuple[str, int, int, int], dtype: torch.dtype) -> None:
    check(kernel("triton"), dtype, shape)


def test_other_pairs_are_refused() -> None:
    case = Case(*SHAPES[0], [4], torch.float32)
    case.table = replace(case.table, interleaved=False)
    with pytest.raises(ValueError, match="interleaved pairs"):
        case.run(kernel("triton"), [[4]])
