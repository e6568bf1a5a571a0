"""FP8 weights in host memory by the C++ library: their values, and plain weights rounded to FP8, in one pass.

Without the library, and for tensors that it does not take, callers compute in torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_engine.kernels.cpu.library import Library, LibraryError, load
from moe_engine.kernels.cpu.tensors import KIND
from moe_engine.kernels.quantization.protocol import FP8

_DTYPES = (FP8, torch.float8_e5m2)
_HOST = torch.device("cpu")


def _library(*tensors: Tensor) -> Library | None:
    """None also if a tensor is not on the host, or its rows are not contiguous."""
    if any(tensor.device != _HOST or tensor.stride(-1) != 1 for tensor in tensors):
        return None
    try:
        return load()
    except LibraryError:
        return None


def fp8_values(out: Tensor, weight: Tensor, scales: Tensor, block: tuple[int, int], first: tuple[int, int]) -> bool:
    """out[r, c] = weight[r, c] * scales[(r + first[0]) div block[0], (c + first[1]) div block[1]].

    Returns:
        False: not available; `out` is unchanged.

    Args:
        out: [N, K] in float32 or bfloat16.
        weight: [N, K] in e4m3 or e5m2.
        scales: float32.
    """
    if out.dtype not in KIND or weight.dtype not in _DTYPES or scales.dtype != torch.float32:
        return False
    library = _library(out, weight, scales)
    if library is None:
        return False
    library.moe_fp8_values(
        KIND[out.dtype], int(weight.dtype != FP8), weight.data_ptr(), weight.stride(0), *weight.shape,
        scales.data_ptr(), scales.stride(0), *block, *first, out.data_ptr(), out.stride(0),
    )  # fmt: skip
    return True


def fp8_rounding(weight: Tensor) -> Callable[[], None] | None:
    """The call after which weight [N, K], in float32 or bfloat16, has the values of its quantization to e4m3 with a
    scale per block of 128 x 128; None if it is not available."""
    library = _library(weight) if weight.dtype in KIND else None
    if library is None:
        return None
    arguments = KIND[weight.dtype], weight.data_ptr(), weight.stride(0), *weight.shape
    return lambda: library.moe_fp8_round(*arguments)
