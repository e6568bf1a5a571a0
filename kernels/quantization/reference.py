"""Block FP8 in plain torch: the reference of the kernels, on any device.

Legend: M rows, N out-features, K in-features, I width of an MLP.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.kernels.gate_form import GatedActivation
from moe_engine.kernels.gated_activation import activate
from moe_engine.kernels.powers_of_two import power_of_two_above
from moe_engine.kernels.quantization.protocol import (
    BLOCK,
    FP8,
    FP8_MAX,
    MIN_AMAX,
    BlockWeight,
    QuantizedRows,
    RowWeight,
)


def quantize_rows(x: Tensor, power_of_two: bool = False, exponents: bool = False) -> QuantizedRows:
    """x [M, K] -> e4m3; each row's scale of 128 channels is amax / 448, optionally rounded up to a power of two, and
    with that optionally stored as an exponent."""
    m, k = x.shape
    blocks = F.pad(x.float(), (0, -k % BLOCK)).unflatten(1, (-1, BLOCK))  # [M, K/128, 128]
    scales = blocks.abs().amax(2).clamp_min(MIN_AMAX) / FP8_MAX
    if power_of_two:
        scales = power_of_two_above(scales)
    quantized = (blocks / scales.unsqueeze(2)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    rows = QuantizedRows.empty(m, k, x.device, exponents=exponents)
    rows.data.copy_(quantized.flatten(1)[:, :k])
    rows.scales.copy_(as_exponents(scales) if exponents else scales)
    return rows


def as_exponents(scales: Tensor) -> Tensor:
    """scales [.., K / 128], positive powers of two -> their exponents in int32 [.., K / 512]."""
    exponents = scales.contiguous().view(torch.int32) >> 23
    parts = F.pad(exponents, (0, -exponents.shape[-1] % 4)).unflatten(-1, (-1, 4)).unbind(-1)
    return parts[0] | parts[1] << 8 | parts[2] << 16 | parts[3] << 24


def as_scales(exponents: Tensor, blocks: int) -> Tensor:
    """`as_exponents` reversed: float32 [.., blocks]."""
    parts = torch.stack([exponents >> shift & 0xFF for shift in (0, 8, 16, 24)], -1).flatten(-2)
    return (parts[..., :blocks] << 23).view(torch.float32)


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, power_of_two: bool = False,
    keep: bool = True,
) -> tuple[Tensor | None, QuantizedRows]:  # fmt: skip
    """residual += x in place if given, then RMSNorm: normed [M, K] in x's dtype (None unless `keep`), and its quantized
    form."""
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    normed = (normed.to(x.dtype) * weight).to(x.dtype)
    return normed if keep else None, quantize_rows(normed, power_of_two)


def silu_mul_quantize(
    gate_up: Tensor, power_of_two: bool = False, exponents: bool = False, limit: float = 0.0
) -> QuantizedRows:
    """gate_up [M, 2I], gate first -> silu(gate) * up, quantized, [M, I]. limit: as in `Ops.silu_and_mul`."""
    return quantize_rows(silu_mul(gate_up, limit), power_of_two, exponents)


def silu_mul(gate_up: Tensor, limit: float = 0.0) -> Tensor:
    """The same unquantized, in float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return activate(gate, up, GatedActivation(limit))


def dequantize_rows(rows: QuantizedRows, dtype: torch.dtype = torch.float32) -> Tensor:
    """[M, K] in `dtype`."""
    width = rows.data.shape[1]
    scales = as_scales(rows.scales, -(-width // BLOCK)) if rows.exponents else rows.scales
    scales = scales.to(dtype).repeat_interleave(BLOCK, 1)[:, :width]
    return rows.data.to(dtype) * scales


def dequantize_weight(weight: BlockWeight | RowWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """[N, K] in `dtype`."""
    n, k = weight.data.shape
    if isinstance(weight, RowWeight):
        return weight.data.to(dtype) * weight.scales.to(dtype)[:, None]
    scales = weight.scales.to(dtype).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.data.to(dtype) * scales[:n, :k]


def quantize_weight(weight: Tensor, power_of_two: bool = False) -> BlockWeight:
    """weight [N, K] -> e4m3 with one scale per 128 x 128 block."""
    n, k = weight.shape
    padded = F.pad(weight.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)  # [N/128, 128, K/128, 128]
    scales = blocks.abs().amax((1, 3)).clamp_min(1e-12) / FP8_MAX
    if power_of_two:
        scales = scales.log2().ceil().exp2()
    quantized = (blocks / scales[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return BlockWeight(quantized.view(padded.shape)[:n, :k].contiguous(), scales.contiguous(), power_of_two)
