"""Convolutions between two gates in C++ (`short_conv`), one call a layer."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.cpu.tensors import kind_of, rows
from moe_engine.kernels.delta.protocol import StateRuns


class _ShortConv(ctypes.Structure):
    """`moe::ShortConv` of short_conv.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("runs", "width", "taps", "stride")),
        *((name, ctypes.c_void_p) for name in ("starts", "reads", "stores", "weights")),
    )


def gated_conv(library: Library, projected: Tensor, taps: Tensor, kept: Tensor, runs: StateRuns) -> Tensor:
    """`GatedConv` for bfloat16 and float32. A result does not depend on how a prompt is cut into chunks."""
    projected, (count, width) = rows(projected), taps.shape
    if kept.dtype != projected.dtype or not kept.is_contiguous() or projected.shape != (runs.num_tokens, 3 * width):
        raise ValueError(
            f"a projection {list(projected.shape)} {projected.dtype} of {runs.num_tokens} tokens does not fit states "
            f"{list(kept.shape)} {kept.dtype}, or these are not contiguous"
        )
    out = torch.empty((len(projected), width), dtype=projected.dtype)
    struct = _ShortConv(
        len(runs.lens), width, count, projected.stride(0), runs.starts.data_ptr(), runs.reads.data_ptr(),
        runs.rows.data_ptr(), taps.data_ptr(),
    )  # fmt: skip
    library.moe_short_conv(
        kind_of(projected.dtype), ctypes.byref(struct), projected.data_ptr(), kept.data_ptr(), out.data_ptr()
    )
    return out
