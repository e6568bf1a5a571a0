"""Quantization of plain weights to symmetric integers with a scale per group or row: the reference of the C++ library,
which quantizes what it packs (`cpu/src/quantize.cpp`).

Legend: N out-features, K in-features, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.quantization.codes import CodedWeight

CHUNK_ELEMENTS = 1 << 21
RANGES = (1.0, 0.93, 0.86, 0.8)
"""Fractions of the largest magnitude that a 4-bit scale may cover: the fraction with the least squared error is
chosen."""
SCALE_BITS = 5
"""Significant bits of a 4-bit scale: a code, of 3 bits and a sign, times its scale is exact in bfloat16."""
_LEAST = 1e-12


def quantize_codes(weight: Tensor, out: CodedWeight) -> None:
    """out = weight [N, K] in `out.format`, symmetric; some rows at a time.

    Raises:
        ValueError: the format has zero points or other values than integers.
    """
    format, (n, k) = out.format, weight.shape
    if format.zeros or format.values != "int":
        raise ValueError(f"weights are not quantized to {format}")
    step = max(1, CHUNK_ELEMENTS // max(1, k))
    for start in range(0, n, step):
        rows = slice(start, start + step)
        grouped = weight[rows].float().view(-1, k // format.group_of(k), format.group_of(k))
        codes, scales = _quantized(grouped, format.middle, getattr(torch, format.scales))
        out.codes[rows].copy_(codes.view(-1, k))
        out.scales[rows].copy_(scales)


def _quantized(grouped: Tensor, middle: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[N, G, group] -> codes and scales [N, G]."""
    most = grouped.abs().amax(-1, keepdim=True)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for part in RANGES if middle == 8 else RANGES[:1]:
        scale = (most * (part / (middle - 1))).clamp_min_(_LEAST)
        scale = short_scales(scale) if middle == 8 else scale.to(dtype).float()
        codes = (grouped * scale.reciprocal()).round_().clamp_(-middle, middle - 1)
        error = (codes * scale - grouped).square_().sum(-1, keepdim=True)
        if best is None:
            best = error, codes, scale
            continue
        better = error < best[0]
        best = torch.minimum(error, best[0]), torch.where(better, codes, best[1]), torch.where(better, scale, best[2])
    assert best is not None
    return best[1].add_(middle), best[2].squeeze(-1)


def short_scales(scales: Tensor) -> Tensor:
    """Positive float32 rounded to `SCALE_BITS` significant bits."""
    fraction, exponent = torch.frexp(scales)
    return torch.ldexp(torch.round(fraction * 2**SCALE_BITS) / 2**SCALE_BITS, exponent)
