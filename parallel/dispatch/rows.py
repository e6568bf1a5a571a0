"""Gather and sum of rows, used by every dispatcher on its own rank.

`F.embedding_bag` is torch's fused gather, scale and sum: one pass, float32 sums, and it reads only listed rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.kernels.permutation.reference import halves


def sum_rows(rows: Tensor, positions: Tensor, weights: Tensor | None = None, count: int | None = None) -> Tensor:
    """rows [M, D], positions int64 [N, S] (-1: none), weights float32 [N, S] -> [N, D] in rows' dtype.

    Reads only listed rows.

    Args:
        count: number of positions that are not -1; None reads it from the device (synchronises).
    """
    valid = positions >= 0
    ends = valid.sum(1).cumsum(0)
    offsets = F.pad(ends, (1, 0))
    chosen = _where(valid, positions, count)
    if weights is None:
        return F.embedding_bag(chosen, rows, offsets, mode="sum", include_last_offset=True)
    scale = _where(valid, weights, count)
    if rows.dtype == torch.float32:
        return F.embedding_bag(
            chosen, rows, offsets, mode="sum", include_last_offset=True, per_sample_weights=scale
        )  # fmt: skip
    # The weights must have the rows' dtype: list each row twice, with the weight's high and low half.
    scale = halves(scale, rows.dtype).flatten()
    return F.embedding_bag(
        chosen.repeat_interleave(2), rows, offsets * 2, mode="sum", include_last_offset=True, per_sample_weights=scale
    )


def _where(mask: Tensor, values: Tensor, count: int | None) -> Tensor:
    """values[mask] [count], without synchronisation if the host knows the count."""
    if count is None:
        return values[mask]
    places = torch.where(mask.flatten(), mask.flatten().cumsum(0) - 1, count)  # unselected entries: one beyond the last
    return values.new_empty(count + 1).scatter_(0, places, values.flatten())[:count]


def sum_rows_static(rows: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
    """`sum_rows` with static shapes, without host synchronisation: usable in a captured graph.

    A missing position reads another row of the token with weight 0, never an uninitialized row.
    """
    valid = positions >= 0
    some = positions.amax(1, keepdim=True)  # one row of this token
    chosen = torch.where(valid, positions, some).clamp_min_(0)
    scale = valid.to(rows.dtype) if weights is None else weights * valid
    if weights is not None and rows.dtype != torch.float32:
        chosen = chosen.repeat_interleave(2, dim=1)
        scale = halves(scale, rows.dtype).flatten(1)
    sums = F.embedding_bag(chosen, rows, mode="sum", per_sample_weights=scale)
    return sums.masked_fill_(some < 0, 0)


def owner_mask(ids: Tensor, num_local: int, num_ranks: int) -> Tensor:
    """Physical ids [T, K] -> bool [T, R]: True if the rank holds any expert of the token. -1 has no rank."""
    ranks = torch.arange(num_ranks, dtype=ids.dtype, device=ids.device)
    return ((ids // num_local).unsqueeze(2) == ranks).any(1)


def local_ids(ids: Tensor, rank: int, num_local: int) -> Tensor:
    """Physical ids -> local ids, counted from the rank's first expert; -1 for other ranks' experts."""
    local = ids - rank * num_local
    return local.masked_fill_(local.clamp(0, num_local - 1) != local, -1)


def without_lost(ids: Tensor, alive: Tensor | None) -> Tensor:
    """ids [R * M, K] of the rows of R ranks, in rank order -> the same, -1 for ranks not `alive` [R]."""
    if alive is None:
        return ids
    return torch.where(alive.repeat_interleave(len(ids) // len(alive)).unsqueeze(1), ids, -1)


def check_choices(ids: Tensor, num_experts: int) -> None:
    """Rejects invalid router output. Synchronises with the device, once.

    Raises:
        ValueError: an id outside -1..num_experts-1, or a repeated expert in one token.
    """
    if not ids.numel():
        return
    ordered = ids.sort(dim=1).values
    outside = (ordered[:, 0] < -1) | (ordered[:, -1] >= num_experts)  # [T]
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)  # [T]
    if not bool((outside | twice).any()):
        return
    if bool(outside.any()):
        raise ValueError(f"topk_ids holds an expert outside 0..{num_experts - 1}")
    token = int(twice.nonzero()[0])
    raise ValueError(f"token {token} has a repeated expert: {ids[token].tolist()}")
