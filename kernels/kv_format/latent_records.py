"""A token's latent in an MLA cache as torch tensors: unscaled values (bf16, float32, e4m3, e5m2), or one of two e4m3
records of bytes; `kv_format` describes the layouts.

Legend: S slots, C kv_lora_rank, P rotary width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.kv_format.formats import (
    FP8_GROUPS,
    FP8_RANGE,
    FP8_TENSOR,
    FP8_TOKEN,
    GROUP,
    PLAIN,
    record_bytes,
    scales_offset,
)
from moe_engine.kernels.powers_of_two import power_of_two_above

_UNSCALED = {torch.float8_e5m2: FP8_RANGE, torch.float8_e4m3fn: FP8_TENSOR}

LARGEST_E4M3 = 448.0
LARGEST_E5M2 = 57344.0


def form_of(cache: Tensor, latent: int, rotary: int) -> int:
    """The row format of a cache [S, width]: plain for C + P values, a record for bytes.

    Raises:
        ValueError: if the width matches no format.
    """
    width = cache.shape[-1]
    if cache.dtype != torch.uint8:
        if width != latent + rotary:
            raise ValueError(f"a cache row has {width} values, the latent has {latent} + {rotary}")
        return _UNSCALED.get(cache.dtype, PLAIN)
    for form in (FP8_TOKEN, FP8_GROUPS):
        if (form == FP8_TOKEN or latent % GROUP == 0) and width == record_bytes(form, latent, rotary):
            return form
    raise ValueError(f"a cache row has {width} bytes: no FP8 record of a latent of {latent} + {rotary}")


def pack(rows: Tensor, latent: int, form: int, scale: float = 1.0) -> Tensor:
    """rows [S, C+P] -> records [S, bytes] uint8, or [S, C+P] float8_e5m2 or float8_e4m3fn. Rounds to nearest even.
    `scale` divides rows of `FP8_TENSOR`."""
    if form == FP8_RANGE:
        return to_e5m2(rows)
    if form == FP8_TENSOR:
        return to_e4m3(rows.float(), scale)
    rotary = rows.shape[1] - latent
    records = rows.new_zeros((len(rows), record_bytes(form, latent, rotary)), dtype=torch.uint8)
    values, rope = rows[:, :latent].float(), rows[:, latent:]
    if form == FP8_TOKEN:
        both = torch.stack([scale_of(values), scale_of(rope.float())], 1)  # [S, 2]
        begin = scales_offset(latent, rotary)
        records[:, :latent] = as_bytes(to_e4m3(values, both[:, :1]))
        records[:, latent : latent + rotary] = as_bytes(to_e4m3(rope.float(), both[:, 1:]))
        records[:, begin : begin + 8] = as_bytes(both)
        return records
    groups = values.unflatten(1, (-1, GROUP))
    scales = power_of_two_above(scale_of(groups))  # [S, C/128]
    end = latent + 4 * scales.shape[1]
    records[:, :latent] = as_bytes(to_e4m3(groups, scales[..., None]).flatten(1))
    records[:, latent:end] = as_bytes(scales)
    records[:, end:] = as_bytes(rope.to(torch.bfloat16))
    return records


def unpack(records: Tensor, latent: int, rotary: int) -> Tensor:
    """Rows of any format, [S, .] -> [S, C+P] float32, exact."""
    form = form_of(records, latent, rotary)
    if form in (PLAIN, FP8_RANGE, FP8_TENSOR):
        return records.float()
    values = as_float32(records[:, :latent], torch.float8_e4m3fn)
    if form == FP8_TOKEN:
        begin = scales_offset(latent, rotary)
        both = as_float32(records[:, begin : begin + 8], torch.float32)
        rope = as_float32(records[:, latent : latent + rotary], torch.float8_e4m3fn)
        return torch.cat((values * both[:, :1], rope * both[:, 1:]), 1)
    end = latent + latent // GROUP * 4
    scales = as_float32(records[:, latent:end], torch.float32)
    scaled = values.unflatten(1, (-1, GROUP)) * scales[..., None]
    return torch.cat((scaled.flatten(1), as_float32(records[:, end:], torch.bfloat16)), 1)


def scale_of(values: Tensor) -> Tensor:
    """[..., n] -> [...]: the divisor that brings the largest magnitude into e4m3's range."""
    return values.abs().amax(-1).clamp(min=1e-12) / LARGEST_E4M3


def to_e4m3(values: Tensor, scale: Tensor | float) -> Tensor:
    """values / scale [...]; saturates."""
    return (values / scale).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)


def as_queries(q: Tensor) -> Tensor:
    """Unscaled e4m3 queries of any shape, as kernels read them that multiply in e4m3; saturates."""
    return q if q.dtype == torch.float8_e4m3fn else q.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)


def to_e5m2(values: Tensor) -> Tensor:
    """Saturates: out-of-range values become the largest finite value, not infinity."""
    return values.float().clamp(-LARGEST_E5M2, LARGEST_E5M2).to(torch.float8_e5m2)


def as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def as_float32(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [..., n] reinterpreted as `dtype` values, as float32."""
    return raw.contiguous().view(dtype).float()
