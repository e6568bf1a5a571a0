"""Compressed entries in C++ on other machines' code paths."""

from __future__ import annotations

import pytest
import torch

from moe_engine.kernels.compression.cpu import CpuCompression
from moe_engine.kernels.cpu.library import Library
from tests.kernels.cpu.conftest import threads
from tests.kernels.reference.test_compression import SHAPES, Case, check


@pytest.mark.parametrize("shape", SHAPES)
def test_entries(any_library: Library, dtype: torch.dtype, shape: tuple[str, int, int, int]) -> None:
    with threads(2):
        check(CpuCompression(any_library), dtype, shape)


def test_projections_of_another_width_are_refused(library: Library) -> None:
    case = Case(*SHAPES[1], [3], torch.float32)
    case.projected = [rows[:, 4:] for rows in case.projected]
    with pytest.raises(ValueError, match="do not fit 2 series of 20 channels"):
        case.run(CpuCompression(library), [[3]])
