"""Residual streams with gates of low rank in C++ (`gated_streams`), a call each.

Legend: as in `gated_streams`.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.cpu.tensors import kind_of, rows
from moe_engine.kernels.ops.gated_streams import GatedStreams, norm


class _Streams(ctypes.Structure):
    """`moe::GatedStreams` of gated_streams.cpp."""

    _fields_ = (*((name, ctypes.c_int64) for name in ("tokens", "width", "count")), ("eps", ctypes.c_float))


class CpuGatedStreams:
    """The functions of `GatedStreams`."""

    def __init__(self, library: Library) -> None:
        self._lib = library
        self.kernels = GatedStreams(self.norm, self.gate, self.read)

    def norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`GatedStreams.norm`."""
        if residual.stride(1) != 1:
            return norm(x, residual, weight, eps)
        count, width = weight.shape
        out = residual.new_empty(len(residual), count * width)
        x = None if x is None else rows(x.to(residual.dtype))
        self._lib.moe_norm_gated(
            kind_of(residual.dtype), ctypes.byref(_Streams(len(residual), width, count, eps)),
            None if x is None else x.data_ptr(), 0 if x is None else x.stride(0), residual.data_ptr(),
            residual.stride(0), weight.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def gate(self, projected: Tensor, rank: int, count: int, residual: Tensor | None) -> Tensor:
        """`GatedStreams.gate`."""
        projected = rows(projected)
        out = projected.new_empty(len(projected), rank)
        weights = None if residual is None else residual[:, residual.shape[1] - count :]
        self._lib.moe_rank_gates(
            kind_of(projected.dtype), ctypes.byref(_Streams(len(projected), 0, count, 0.0)), projected.data_ptr(),
            projected.stride(0), rank, None if weights is None else weights.data_ptr(),
            0 if weights is None else weights.stride(0), out.data_ptr(),
        )  # fmt: skip
        return out

    def read(self, gates: Tensor, normed: Tensor, count: int) -> Tensor:
        """`GatedStreams.read`."""
        gates, normed = gates.contiguous(), normed.contiguous()
        tokens, width = len(normed), normed.shape[1] // count
        out = normed.new_empty(tokens, width)
        self._lib.moe_read_gated(
            kind_of(normed.dtype), ctypes.byref(_Streams(tokens, width, count, 0.0)), gates.data_ptr(),
            normed.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out
