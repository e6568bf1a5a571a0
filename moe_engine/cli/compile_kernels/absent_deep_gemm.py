"""DeepGEMM on a machine without a GPU: calls without products, so that the Triton kernels around them are compiled.

DeepGEMM compiles its own kernels at the first call of each shape, for the architecture, multiprocessors and L2 size
that it reads from the current GPU (csrc/jit/device_runtime.hpp). nvcc alone is not enough, and the library has no call
that only compiles. Its cache (DG_JIT_CACHE_DIR) is filled on a node with a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.linear.deep_gemm_products import DeepGemm
from moe_engine.kernels.quantization.protocol import BLOCK

ALIGNMENT = 128
"""Rows of a group are aligned to this number (csrc/utils/layout.hpp)."""


class AbsentDeepGemm:
    """The functions of `probe.DEEP_GEMM`, which write nothing.

    Args:
        takes_ends: True if grouped products take the ends of groups. All builds for Blackwell do, some for Hopper.
    """

    def __init__(self, takes_ends: bool) -> None:
        self._takes_ends = takes_ends
        if takes_ends:
            self.set_mk_alignment_for_contiguous_layout = lambda rows: None

    def fp8_gemm_nt(self, a: Any, b: Any, out: Tensor, *args: Any, **kwargs: Any) -> None:
        return None

    def m_grouped_fp8_gemm_nt_contiguous(
        self, a: Any, b: Any, out: Tensor, layout: Tensor, *, use_psum_layout: bool = False
    ) -> None:
        self._check_ends(use_psum_layout)

    def m_grouped_bf16_gemm_nt_contiguous(
        self, a: Any, b: Any, out: Tensor, layout: Tensor, *, use_psum_layout: bool = False
    ) -> None:
        self._check_ends(use_psum_layout)

    def m_grouped_fp8_gemm_nt_masked(self, a: Any, b: Any, out: Tensor, counts: Tensor, expected: int) -> None:
        return None

    def m_grouped_bf16_gemm_nt_masked(self, a: Any, b: Any, out: Tensor, counts: Tensor, expected: int) -> None:
        return None

    def transform_sf_into_required_layout(
        self, sf: Tensor, mn: int, k: int, recipe: Sequence[int], num_groups: int | None = None, is_sfa: bool = False
    ) -> Tensor:
        """Four exponents an int32, in columns of whole 16 bytes."""
        columns = -(-k // (4 * BLOCK))
        lead = () if num_groups is None else (num_groups,)
        memory = torch.empty(*lead, columns, -(-mn // 4) * 4, dtype=torch.int32, device=sf.device)
        return memory.transpose(-1, -2)[..., :mn, :]

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return ALIGNMENT

    def _check_ends(self, asked: bool) -> None:
        if asked and not self._takes_ends:
            raise RuntimeError("this build takes no ends of groups")


def absent_products(capability: tuple[int, int], takes_ends: bool) -> DeepGemm:
    """The library's products on a GPU of this capability, for kernels of both families."""
    return DeepGemm(AbsentDeepGemm(takes_ends), capability)


def note(families: Sequence[str]) -> str:
    """The kernels missing in the folder for these families, and the way to compile them."""
    return (
        f"not in the folder: DeepGEMM's own kernels ({', '.join(families)}). It compiles for the GPU that it finds, so "
        "not on this machine; start this launch once on a node with the GPU and DG_JIT_CACHE_DIR on a shared folder, "
        "and set the variable on all nodes"
    )
