"""Collectives over uneven row counts (gatherv, scatterv), without padding.

With equal counts these are the plain collectives. Legend: R ranks, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_engine.parallel.collectives import Group


def gather_rows(group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
    """x [counts[rank], C] -> all ranks' rows [sum(counts), C], in rank order."""
    if group.size == 1:
        return x
    if not any(counts):
        return x
    if len(set(counts)) == 1:
        return group.all_gather(x).flatten(0, 1)
    out = x.new_empty(sum(counts), *x.shape[1:])
    group.all_to_all(out, x.repeat(group.size, 1), counts, [len(x)] * group.size)
    return out


def scatter_sums(group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
    """x [sum(counts), C], partial sums of all ranks' rows -> the sum over the ranks of this rank's rows."""
    if group.size == 1:
        return x
    if not any(counts):
        return x
    own = counts[group.rank]
    if len(set(counts)) == 1:
        return group.reduce_scatter(x.view(group.size, own, x.shape[1]))
    received = x.new_empty(group.size * own, *x.shape[1:])
    group.all_to_all(received, x.contiguous(), [own] * group.size, counts)
    return received.view(group.size, own, x.shape[1]).sum(0)


def sum_over(group: Group, x: Tensor) -> Tensor:
    """The sum over the ranks, bit-identical on every rank."""
    return x if group.size == 1 or not x.numel() else group.all_reduce(x)


def exchange_columns(group: Group, x: Tensor, rows: Sequence[int]) -> Tensor:
    """x [sum(rows), W], this rank's columns of all rows -> all columns of this rank's rows, by rank:
    [R, rows[rank], W]."""
    own = rows[group.rank]
    out = torch.empty(group.size * own, x.shape[1], dtype=x.dtype, device=x.device)
    group.all_to_all(out, x.contiguous(), [own] * group.size, rows)
    return out.view(group.size, own, x.shape[1])
