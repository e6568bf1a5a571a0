"""FP8 index keys: Hadamard transform, quantization, and their records in the cache.

A record is I e4m3 values, padding to 4 bytes, and a float32 scale, a power of two: 132 bytes for 128 channels, as
`kv_format` counts a head of an FP8 cache. In DeepGEMM's pages the values of all tokens of a page come first, then their
scales.

Legend: T tokens, I channels of an index head.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from moe_engine.kernels.kv_format.formats import head_scale_offset
from moe_engine.kernels.kv_format.latent_records import LARGEST_E4M3, as_bytes, as_float32
from moe_engine.kernels.powers_of_two import power_of_two_above

LEAST_MAGNITUDE = 1e-4
"""Min magnitude for the scale: smaller magnitudes are quantized with the scale of this one."""


@lru_cache
def _hadamard_matrix(width: int, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix * width**-0.5).to(device)


def hadamard(x: Tensor) -> Tensor:
    """x [..., I] times the orthogonal Hadamard matrix, float32; I is a power of two."""
    return x.float() @ _hadamard_matrix(x.shape[-1], x.device)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., I] -> e4m3 values [..., I], scales [...] float32. DeepSeek's act_quant with scale_fmt ue8m0."""
    x = x.float()
    scales = power_of_two_above(x.abs().amax(-1).clamp(min=LEAST_MAGNITUDE) / LARGEST_E4M3)
    values = (x / scales.unsqueeze(-1)).clamp(-LARGEST_E4M3, LARGEST_E4M3)
    return values.to(torch.float8_e4m3fn), scales


def quantize_queries(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, Hi, I], weights [T, Hi] -> e4m3 queries after the Hadamard transform, weights with their scales."""
    values, scales = quantize(hadamard(q))
    return values, weights * scales


def pack(keys: Tensor) -> Tensor:
    """keys [T, I] -> records [T, bytes] uint8 of their Hadamard transform."""
    width = keys.shape[1]
    values, scales = quantize(hadamard(keys))
    records = keys.new_zeros((len(keys), head_scale_offset(width) + 4), dtype=torch.uint8)
    records[:, :width] = as_bytes(values)
    records[:, head_scale_offset(width) :] = as_bytes(scales.unsqueeze(1))
    return records


def unpack(records: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """records [S, bytes] -> values [S, I] float32 without scale, scales [S]."""
    scales = as_float32(records[:, head_scale_offset(width) :], torch.float32)[:, 0]
    return as_float32(records[:, :width], torch.float8_e4m3fn), scales


def write(keys: Tensor, slots: Tensor, cache: Tensor) -> None:
    """keys [T, I] -> cache[slots], [num_slots, 1, I] or records."""
    rows = pack(keys) if cache.dtype == torch.uint8 else keys.to(cache.dtype)
    cache.squeeze(1).index_copy_(0, slots.long(), rows)
