"""Coded weights in the layout of the C++ library (`src/coded.h`)."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from torch import Tensor

from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.cpu.tensors import kind_of, rows
from moe_engine.kernels.quantization.codes import Coded, GroupCodes, PlainWeight

_SCALES = {"float32": 0, "bfloat16": 1, "float16": 2}


class Coding(ctypes.Structure):
    """The C struct of a `GroupCodes` with the group of a weight."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("bits", "group", "scale_type", "has_zeros", "factors", "parts")),
        ("table", ctypes.c_float * 16),
    ]

    @property
    def address(self) -> int:
        return ctypes.addressof(self)


@lru_cache
def form_of(format: GroupCodes, k: int, deterministic: bool = False) -> Coding:
    """The form of weights with k columns; the same object for the same arguments, never freed. deterministic: a row's
    bits do not depend on the number of rows."""
    table = (ctypes.c_float * 16)(*format.table())
    parts = 0 if deterministic else 1 if format.exact_in_bf16 else 2
    return Coding(format.bits, format.group_of(k), _SCALES[format.scales], format.zeros, format.factors, parts, table)


def pack(library: Library, weight: Coded, address: int) -> None:
    """Writes a weight [N, K] to memory of `moe_coded_bytes`; one without codes is quantized.

    Raises:
        ValueError: its columns do not form whole groups, or plain values cannot be quantized to the format.
    """
    format, (n, k) = weight.format, weight.shape
    if not format.takes(k):
        group = format.group_of(k) * (format.factors or 1)
        raise ValueError(f"{k} columns do not fit groups of {group} columns, multiples of 8")
    form = form_of(format, k)
    if isinstance(weight, PlainWeight):
        if format.zeros or format.factors or format.values != "int" or format.scales == "float16":
            raise ValueError(f"weights are not quantized to {format}")
        values = weight.values if weight.kept else rows(weight.values)
        library.moe_coded_quantize(
            form.address, kind_of(values.dtype), values.data_ptr(), values.stride(0), n, k, address, int(weight.kept)
        )
        return
    codes, scales = rows(weight.codes), weight.scales.contiguous()
    zeros = _contiguous(weight.zeros if weight.factors is None else weight.factors)
    library.moe_coded_pack(
        form.address, codes.data_ptr(), codes.stride(0), scales.data_ptr(), None if zeros is None else zeros.data_ptr(),
        n, k, address,
    )  # fmt: skip


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
