"""Compressed entries in plain torch.

Legend: as in `protocol`; E entries that a step completes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.compression.protocol import CompressedTokens, CompressorWeights, Kept
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.ops.reference import rotate_


class TorchCompression:
    """`CompressionKernel` for any device."""

    name = "torch"
    plan_rows = None
    sum_pairs = None

    def compress(
        self, projected: Tensor, kept: Kept, weights: CompressorWeights, rotary: RotaryTable, tokens: CompressedTokens,
        out: Tensor, places: Tensor | None = None,
    ) -> None:  # fmt: skip
        if places is not None:
            kept.rows.index_copy_(0, places, projected)
        rate, width = weights.rate, len(weights.norm)
        last = ((tokens.positions + 1) % rate == 0).nonzero().squeeze(1)  # [E]
        if not len(last):
            return
        ends = tokens.positions[last] + 1
        requests, starts = tokens.rows[last].long()[:, None], tokens.starts[last][:, None]
        values, gates = [], []
        for series in range(weights.series):
            windows_before = weights.series - 1 - series
            first = ends - (windows_before + 1) * rate
            at = first.unsqueeze(1) + torch.arange(rate, device=ends.device)  # [E, rate]
            own = kept.places(at, requests, tokens.table[requests, at.clamp(min=0)])
            in_step = last[:, None] - (ends[:, None] - 1 - at)
            found = torch.where(
                (at >= starts)[..., None], projected[in_step.clamp(min=0)], kept.rows[own.clamp(min=0)]
            )  # [E, rate, 2 S W]
            value, gate = found.unflatten(2, (2, weights.series, width))[:, :, :, series].float().unbind(2)
            absent = at.unsqueeze(2) < 0  # window 0 has none before
            bias = weights.bias.view(rate, weights.series, width)[:, series]
            values.append(value.masked_fill(absent, 0.0))
            gates.append((gate + bias).masked_fill(absent, float("-inf")))
        entries = (torch.cat(gates, 1).softmax(1) * torch.cat(values, 1)).sum(1)  # [E, W]
        entries = entries * torch.rsqrt(entries.square().mean(1, keepdim=True) + weights.eps) * weights.norm
        rotate_(entries[:, None, width - rotary.width :], ends - rate, rotary)
        out.index_copy_(0, tokens.slots[last] // rate, entries.to(out.dtype))
