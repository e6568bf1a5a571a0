"""Permute and unpermute (sort tokens by expert, gather, weighted sum) in plain torch; same names as `triton_permute`.

Legend: T tokens, K experts per token, P = T * K pairs (token, choice), E experts, D hidden, M rows.
No shape depends on a value and there is no host synchronisation, so a captured graph can replay it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_engine.kernels.quantization.protocol import FP8, QuantizedRows


@dataclass(frozen=True)
class ExpertOrder:
    """Pairs sorted by expert, then by token.

    Attributes:
        offsets: int32 [E + 1]; expert e has rows offsets[e]:offsets[e + 1], its padding included.
        ends: int32 [E], end of expert e's valid rows, start of its padding.
        positions: int32 [T, K], the row of each pair; -1 if its id is not one of the E experts.
        source: int32 [M], the pair t * K + k of each row, -1 in padding; without padding between groups, rows from
            offsets[E] on are unspecified.
    """

    offsets: Tensor
    ends: Tensor
    positions: Tensor
    source: Tensor


def most_rows(num_pairs: int, num_experts: int, align: int) -> int:
    """M: there are at most as many non-empty groups as pairs, and each wastes less than one alignment."""
    worst = num_pairs + min(num_experts, num_pairs) * (align - 1)
    return -(-worst // align) * align


def sort_by_expert(topk_ids: Tensor, num_experts: int, align: int = 1) -> ExpertOrder:
    """Sorts the pairs of topk_ids int32 [T, K] by expert, stably; groups start at multiples of `align`."""
    ids, device = topk_ids.flatten(), topk_ids.device
    ordered, pairs = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts).sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(num_experts + 1, dtype=ordered.dtype, device=device))
    counts = starts.diff()
    sizes = (counts + align - 1).div(align, rounding_mode="floor") * align
    ends = sizes.cumsum(0)
    groups = ends - sizes  # [E]
    most = most_rows(len(ids), num_experts, align)
    rank = torch.arange(len(ids), device=device) - starts[ordered.long()]
    row = torch.where(ordered < num_experts, groups[ordered.clamp_max(num_experts - 1).long()] + rank, -1)
    source = torch.full((most + 1,), -1, dtype=torch.int32, device=device)  # the last entry receives discarded writes
    source[row] = torch.where(row < 0, -1, pairs).to(torch.int32)
    positions = torch.empty(len(ids), dtype=torch.int32, device=device)
    positions[pairs] = row.to(torch.int32)
    offsets = torch.cat((groups, ends[-1:])).to(torch.int32)
    return ExpertOrder(offsets, (groups + counts).to(torch.int32), positions.view(topk_ids.shape), source[:-1])


def permute(x: Tensor, order: ExpertOrder) -> Tensor:
    """x [T, D] -> [M, D]: each row is its pair's token, zeros in padding."""
    return x[_tokens(order)].masked_fill_((order.source < 0).unsqueeze(1), 0)


def permute_rows(x: QuantizedRows, order: ExpertOrder) -> QuantizedRows:
    """`permute` of quantized tokens; the scales of padding are 1."""
    rows = QuantizedRows.empty(len(order.source), x.data.shape[1], x.data.device)
    rows.data.copy_(permute(x.data.view(torch.uint8), order).view(FP8))
    rows.scales.copy_(x.scales[_tokens(order)].masked_fill_((order.source < 0).unsqueeze(1), 1.0))
    return rows


def combine(rows: Tensor, positions: Tensor, weights: Tensor, add: Tensor | None = None) -> Tensor:
    """rows [M, D], positions int32 [T, K] (-1: none), weights float32 [T, K], add [T, D] -> [T, D] in rows' dtype."""
    none = (positions < 0).unsqueeze(2)
    weighted = rows[positions.clamp_min(0).long()].float() * weights.unsqueeze(2)
    total = weighted.masked_fill_(none, 0.0).sum(1)
    return (total if add is None else total + add.float()).to(rows.dtype)


def _tokens(order: ExpertOrder) -> Tensor:
    """int64 [M]: each row's token; arbitrary in padding."""
    num_tokens, top_k = order.positions.shape
    return order.source.long().clamp(0, num_tokens * top_k - 1) // top_k
