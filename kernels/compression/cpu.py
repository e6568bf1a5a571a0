"""Compressed entries in C++: one call a layer."""

from __future__ import annotations

import ctypes

from torch import Tensor

from moe_engine.kernels.compression.protocol import CompressedTokens, CompressorWeights, Kept
from moe_engine.kernels.cpu.library import Library, load
from moe_engine.kernels.cpu.tensors import kind_of
from moe_engine.kernels.ops.protocol import RotaryTable


class _Compression(ctypes.Structure):
    """`moe::Compression` of compression.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("tokens", "rate", "series", "width", "rotary", "table_row", "interleaved", "each", "block")
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("positions", "starts", "rows", "table", "slots", "bias", "norm", "angles")
        ),
        ("eps", ctypes.c_float),
    )


class CpuCompression:
    """`CompressionKernel` for bfloat16 and float32."""

    name = "cpu"
    plan_rows = None
    sum_pairs = None

    def __init__(self, library: Library | None = None) -> None:
        self._lib = library or load()

    def compress(
        self, projected: Tensor, kept: Kept, weights: CompressorWeights, rotary: RotaryTable, tokens: CompressedTokens,
        out: Tensor, places: Tensor | None = None,
    ) -> None:  # fmt: skip
        width, channels = len(weights.norm), weights.series * len(weights.norm)
        fits = projected.shape[1] == kept.rows.shape[1] == 2 * channels
        fits &= out.shape[1] == width and rotary.width <= width and projected.dtype == kept.rows.dtype == out.dtype
        fits &= all(rows.stride(1) == 1 for rows in (projected, kept.rows, out, tokens.table))
        if not fits:
            raise ValueError(
                f"projections {list(projected.shape)} {projected.dtype} and entries {list(out.shape)} {out.dtype} do "
                f"not fit {weights.series} series of {width} channels, or a row is not contiguous"
            )
        if places is not None:
            kept.rows.index_copy_(0, places, projected)
        positions, starts, slots = tokens.positions.long(), tokens.starts.long(), tokens.slots.long()
        rows = tokens.rows.int()
        struct = _Compression(
            len(positions), weights.rate, weights.series, width, rotary.width, tokens.table.stride(0),
            rotary.interleaved, kept.each, kept.block, positions.data_ptr(), starts.data_ptr(), rows.data_ptr(),
            tokens.table.data_ptr(), slots.data_ptr(), weights.bias.data_ptr(), weights.norm.data_ptr(),
            rotary.cos_sin.data_ptr(), weights.eps,
        )  # fmt: skip
        self._lib.moe_compress(
            kind_of(out.dtype), ctypes.byref(struct), projected.data_ptr(), projected.stride(0),
            kept.rows.data_ptr(), kept.rows.stride(0), out.data_ptr(), out.stride(0),
        )  # fmt: skip
