"""Coded weights in the layout of the C++ library (`src/coded.h`)."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from torch import Tensor

from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.cpu.tensors import rows
from moe_engine.kernels.quantization.codes import CodedWeight, GroupCodes

_SCALES = {"float32": 0, "bfloat16": 1, "float16": 2}


class Coding(ctypes.Structure):
    """The C struct of a `GroupCodes` with the group of a weight."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("bits", "group", "scale_type", "has_zeros", "factors")),
        ("table", ctypes.c_float * 16),
    ]

    @property
    def address(self) -> int:
        return ctypes.addressof(self)


@lru_cache
def form_of(format: GroupCodes, k: int) -> Coding:
    """The form of weights with k columns; the same object for the same arguments, never freed."""
    table = (ctypes.c_float * 16)(*format.table())
    scales = _SCALES[format.scales]
    return Coding(format.bits, format.group_of(k), scales, int(format.zeros), format.factors, table)


def pack(library: Library, weight: CodedWeight, address: int) -> None:
    """Writes a weight [N, K] to memory of `moe_coded_bytes`. Raises ValueError: its columns do not form whole
    groups."""
    n, k = weight.codes.shape
    if not weight.format.takes(k):
        group = weight.format.group_of(k) * (weight.format.factors or 1)
        raise ValueError(f"{k} columns do not fit groups of {group} columns, multiples of 8")
    form = form_of(weight.format, k)
    codes, scales = rows(weight.codes), weight.scales.contiguous()
    zeros = _contiguous(weight.zeros if weight.factors is None else weight.factors)
    library.moe_coded_pack(
        form.address, codes.data_ptr(), codes.stride(0), scales.data_ptr(), None if zeros is None else zeros.data_ptr(),
        n, k, address,
    )  # fmt: skip


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
