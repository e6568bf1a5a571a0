"""A KV head's key or value in a GQA cache as torch tensors: unscaled values (bf16, float32, e5m2), or an e4m3 record
of bytes with its own scale; `kv_format` describes the layouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.kv_format.formats import E4M3, FP8_RANGE, FP8_TOKEN, PLAIN, head_scale_offset, head_width
from moe_engine.kernels.kv_format.latent_records import as_bytes, as_float32, scale_of, to_e4m3, to_e5m2


def form_of(cache: Tensor, width: int) -> int:
    """The row format of a cache [S, G, .] with heads of `width` channels.

    Raises:
        ValueError: if the row length matches no format.
    """
    form = {torch.uint8: FP8_TOKEN, torch.float8_e5m2: FP8_RANGE}.get(cache.dtype, PLAIN)
    expected = head_width(E4M3, width) if form == FP8_TOKEN else width
    if cache.shape[-1] != expected:
        raise ValueError(f"a cache row of {cache.dtype} has {cache.shape[-1]} elements, a head of {width} {expected}")
    return form


def value_width(keys: Tensor, values: Tensor, width: int) -> int:
    """Channels of a value, by the lengths of the rows of both caches and the channels of a key. A record of another
    length than the key's has a multiple of 4 channels, without padding."""
    if values.shape[-1] == keys.shape[-1]:
        return width
    return values.shape[-1] - (head_width(E4M3, 0) if values.dtype == torch.uint8 else 0)


def pack(heads: Tensor, form: int) -> Tensor:
    """heads [..., Dh] -> records [..., bytes] uint8, or [..., Dh] float8_e5m2. Rounds to nearest even."""
    if form == FP8_RANGE:
        return to_e5m2(heads)
    width, values = heads.shape[-1], heads.float()
    scale = scale_of(values).unsqueeze(-1)
    records = heads.new_zeros((*heads.shape[:-1], head_width(E4M3, width)), dtype=torch.uint8)
    records[..., :width] = as_bytes(to_e4m3(values, scale))
    records[..., head_scale_offset(width) :] = as_bytes(scale)
    return records


def unpack(records: Tensor, width: int) -> Tensor:
    """Rows of any format, [..., .] -> [..., Dh] float32, exact."""
    if form_of(records, width) != FP8_TOKEN:
        return records.float()
    scale = as_float32(records[..., head_scale_offset(width) :], torch.float32)  # [..., 1]
    return as_float32(records[..., :width], torch.float8_e4m3fn) * scale
