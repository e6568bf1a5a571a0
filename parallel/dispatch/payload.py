"""Tokens as bytes: FP8 dispatch, and the record of a token with its choices.

A record is one row of bytes: data | scales | router weights (float32) | expert ids (int32), padded to 16 bytes, so that
a token is sent to a rank in one message, whatever its dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_engine.kernels.permutation.protocol import Part, Records
from moe_engine.kernels.powers_of_two import power_of_two_above
from moe_engine.kernels.quantization.protocol import (
    BLOCK,
    FP8,
    FP8_MAX,
    UNQUANTIZED,
    Activation,
    ActivationFormat,
    QuantizedActivation,
    unquantized,
)
from moe_engine.parallel.dispatch.protocol import DispatchShape, Tokens


def encode(x: Activation, ids: Tensor, weights: Tensor, fp8: bool, format: ActivationFormat = UNQUANTIZED) -> Tokens:
    """x [T, D] with its choices in dispatch format; quantized here if needed, in the experts' activation format."""
    data, scales = encode_rows(x, fp8, format)
    return Tokens(data, None if scales is None else scales.contiguous(), ids.to(torch.int32), weights.float())


def encode_rows(x: Activation, fp8: bool, format: ActivationFormat = UNQUANTIZED) -> tuple[Tensor, Tensor | None]:
    """The rows of `encode`, and scales [T, D / 128] in any strides."""
    if not fp8:
        return unquantized(x), None
    if isinstance(x, QuantizedActivation):
        return x.rows.data, x.rows.scales
    return quantize(x, format.power_of_two)


def quantize(x: Tensor, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """x [T, D] -> float8_e4m3fn [T, D] and float32 scales [T, D / 128], with x = data * scale."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(2).clamp_min_(1e-10) / FP8_MAX
    if power_of_two:
        scales = power_of_two_above(scales)
    return (blocks / scales.unsqueeze(2)).to(FP8).flatten(1), scales


def decode(tokens: Tokens, dtype: torch.dtype) -> Tensor:
    """[N, D] in the activation dtype."""
    if tokens.scales is None:
        return tokens.data
    blocks = tokens.data.to(torch.float32).unflatten(1, (-1, BLOCK))
    return blocks.mul_(tokens.scales.unsqueeze(2)).flatten(1).to(dtype)


@dataclass(frozen=True)
class RecordFormat:
    """Byte layout of a token's record."""

    data_dtype: torch.dtype
    hidden: int
    num_scales: int
    top_k: int

    @classmethod
    def of(cls, shape: DispatchShape) -> RecordFormat:
        num_scales = shape.hidden // BLOCK if shape.fp8 else 0
        return cls(FP8 if shape.fp8 else shape.dtype, shape.hidden, num_scales, shape.top_k)

    @property
    def data_bytes(self) -> int:
        return -(-self.hidden * self.data_dtype.itemsize // 4) * 4

    @property
    def num_bytes(self) -> int:
        return -(-(self.data_bytes + 4 * self.num_scales + 8 * self.top_k) // 16) * 16

    @property
    def records(self) -> Records:
        """The layout as kernel argument."""
        return Records(self.num_bytes, self.data_bytes + 4 * self.num_scales + 4 * self.top_k, self.top_k)

    def parts(self, tokens: Tokens) -> list[Part]:
        """The tokens' tensors, each with its byte offset in the records."""
        scales_end = self.data_bytes + 4 * self.num_scales
        found = [(tokens.data, 0), (tokens.weights, scales_end), (tokens.ids, scales_end + 4 * self.top_k)]
        return found if tokens.scales is None else [*found, (tokens.scales, self.data_bytes)]

    def view(self, records: Tensor) -> Tokens:
        """The fields of uint8 [N, num_bytes] records, as views."""
        scales_end = self.data_bytes + 4 * self.num_scales
        weights_end = scales_end + 4 * self.top_k
        data = records[:, : self.hidden * self.data_dtype.itemsize].view(self.data_dtype)
        scales = records[:, self.data_bytes : scales_end].view(torch.float32) if self.num_scales else None
        weights = records[:, scales_end:weights_end].view(torch.float32)
        ids = records[:, weights_end : weights_end + 4 * self.top_k].view(torch.int32)
        return Tokens(data, scales, ids, weights)


def write_parts(tokens: Tokens, into: Tokens) -> None:
    """Packs tokens into the fields of as many records."""
    into.data.copy_(tokens.data)
    into.weights.copy_(tokens.weights)
    into.ids.copy_(tokens.ids)
    if into.scales is not None and tokens.scales is not None:
        into.scales.copy_(tokens.scales)
