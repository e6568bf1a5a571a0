"""Conversion to unscaled e4m3 numbers, as rows of `FP8_TENSOR` and queries over them hold them."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_engine.kernels.kv_format.latent_records import LARGEST_E4M3

_LARGEST_E4M3 = tl.constexpr(LARGEST_E4M3)


@triton.jit
def inside(values, LARGEST: tl.constexpr):
    """Saturated values; NaN stays NaN."""
    values = tl.where(values > LARGEST, LARGEST, values)
    return tl.where(values < -LARGEST, -LARGEST, values)


@triton.jit
def unscaled_e4m3(values):
    """Bytes of float32 values; saturates, NaN stays NaN."""
    return inside(values, _LARGEST_E4M3).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def converted(values, KIND: tl.constexpr):
    """float32 values as elements of a tensor; a tensor of bytes holds e4m3."""
    if tl.uint8 == KIND:
        values = unscaled_e4m3(values)
    else:
        values = values.to(KIND)
    return values
