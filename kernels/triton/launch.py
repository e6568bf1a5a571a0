"""Helpers for launching Triton kernels: type names, tile and warp counts, row strides."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import next_power_of_2

_ELEMENTS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}

UNALIGNED = ("positions", "slots")
"""Arguments that are slices of one upload: their alignment depends on the step's token count. A kernel lists them in
``do_not_specialize_on_alignment``, or an odd count would recompile it; `AotCase` writes ``*i64:1``."""


def element(dtype: torch.dtype) -> str:
    """Triton's name of an element type, as in `AotCase` signatures."""
    return _ELEMENTS[dtype]


def stride_of(x: Tensor, dim: int) -> int:
    """x's stride, 0 where the dimension has one element: its stride is arbitrary and must not compile a new kernel."""
    return x.stride(dim) if x.shape[dim] > 1 else 0


def row_stride(x: Tensor) -> int:
    """Stride of the rows of x [N, D]. The arbitrary stride of a single row must not compile a new kernel; a view into
    records has the stride of the records."""
    return max(x.stride(0), x.shape[1])


def warps_for(elements: int) -> int:
    """Warps of an element-wise program with a tile of `elements`: about eight elements per thread, 1 to 16 warps."""
    return min(16, max(1, next_power_of_2(elements) // 256))


def with_contiguous_rows(x: Tensor) -> Tensor:
    """x, or a copy if its last dimension is strided."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rows_of(x: Tensor) -> tuple[Tensor, int, tuple[int, int]]:
    """x [..., D] as rows of D: (tensor, inner count H, strides); row n starts at (n // H) and (n % H) strides.

    Copies only if the rows have more than two strides or are not contiguous.
    """
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous().view(-1, x.shape[-1])
    if x.dim() == 3:
        return x, x.shape[1], (stride_of(x, 0), stride_of(x, 1))
    return x, 1, (stride_of(x, 0) if x.dim() == 2 else 0, 0)
