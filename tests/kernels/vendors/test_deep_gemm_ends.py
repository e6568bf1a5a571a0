"""Builds of DeepGEMM whose signature has group ends, but which refuse them on Hopper."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_engine.kernels.linear.deep_gemm_products import DeepGemm
from moe_engine.kernels.quantization import reference
from moe_engine.kernels.vendors.probe import DEEP_GEMM


def library(hopper_refuses: bool) -> Any:
    """A library with the functions that the adapter's constructor calls."""

    def grouped(a: Any, b: Any, d: Any, layout: Any, use_psum_layout: bool = False) -> None:
        if hopper_refuses and use_psum_layout:
            raise RuntimeError("Assertion error (csrc/apis/gemm.hpp:196): not use_psum_layout")

    names = dict.fromkeys(DEEP_GEMM.provides, grouped)
    return SimpleNamespace(**names | {"get_mk_alignment_for_contiguous_layout": lambda: 128})


@pytest.mark.parametrize(
    ("capability", "refuses", "ends"),
    [((9, 0), True, False), ((9, 0), False, True), ((10, 0), True, True)],
)
def test_group_ends_are_used_where_the_library_runs_with_them(
    capability: tuple[int, int], refuses: bool, ends: bool
) -> None:
    gemm = DeepGemm(library(refuses), capability, quantization=reference)
    assert gemm.groups(torch.tensor([0, 3, 5], dtype=torch.int32), 5).ends is ends
