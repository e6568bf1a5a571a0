"""Permute and unpermute on one rank: from received tokens to the experts' rows and back.

Legend: N received tokens, K experts per token, E experts of this rank, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.parallel.dispatch.payload import decode
from moe_engine.parallel.dispatch.protocol import Tokens
from moe_engine.parallel.dispatch.rows import sum_rows, sum_rows_static
from moe_engine.parallel.dispatch.workspace import Workspace


class GroupedLayout:
    """`grouped`: one row per local (token, choice), sorted by expert, then by arrival."""

    def __init__(self, num_experts: int, dtype: torch.dtype, device: torch.device) -> None:
        self._experts = torch.arange(num_experts + 1, dtype=torch.int32, device=device)
        self._dtype = dtype
        self._workspace = Workspace(device)

    def expand(self, tokens: Tokens, slot: int) -> tuple[ExpertBatch, Tensor]:
        order, offsets, positions = self._sort(tokens.ids)
        rows = self._gather("rows", decode(tokens, self._dtype), order, slot)
        return ExpertBatch("grouped", rows, offsets=offsets), positions

    def expand_rows(self, tokens: Tokens, slot: int) -> tuple[ExpertBatch, Tensor]:
        assert tokens.scales is not None
        order, offsets, positions = self._sort(tokens.ids)
        rows = self._gather("rows", tokens.data.view(torch.uint8), order, slot).view(tokens.data.dtype)
        scales = self._gather("scales", tokens.scales, order, slot)
        return ExpertBatch("grouped", rows, offsets=offsets, scales=scales, dtype=self._dtype), positions

    def _gather(self, name: str, values: Tensor, tokens: Tensor, slot: int) -> Tensor:
        rows = self._workspace.take(name, slot, (len(tokens), values.shape[1]), values.dtype)
        return torch.index_select(values, 0, tokens, out=rows)

    def _sort(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The token of each row [M], offsets [E + 1], positions [N, K]. Synchronises with the device."""
        ordered, order = ids.flatten().sort(stable=True)  # [N * K], -1 first
        starts = torch.searchsorted(ordered, self._experts, out_int32=True)  # [E + 1]
        num_absent = int(starts[0])
        offsets = starts - num_absent
        positions = torch.empty_like(order)
        positions[order] = torch.arange(-num_absent, len(order) - num_absent, device=order.device).clamp_min_(-1)
        return order[num_absent:] // ids.shape[1], offsets, positions.view(ids.shape)

    def reduce(self, rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
        return sum_rows(rows, positions, weights, count=len(rows))


class PaddedLayout:
    """`padded`: [E, capacity, D] with counts on the device; shapes depend on no value and the host never waits.

    Args:
        capacity: rows per expert. A token has an expert at most once, so the max number of received tokens.
    """

    def __init__(self, num_experts: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_experts = num_experts
        self._capacity = capacity
        # row before each expert's first; the column of non-local choices is so low that no count brings it to 0
        self._bases = torch.arange(num_experts + 1, device=device) * capacity - 1
        self._bases[num_experts] = torch.iinfo(torch.int64).min // 2
        self._dtype = dtype
        self._workspace = Workspace(device)

    def expand(self, tokens: Tokens, slot: int) -> tuple[ExpertBatch, Tensor]:
        counts, positions = self._place(tokens.ids)
        rows = self._spread("rows", decode(tokens, self._dtype), positions, slot)
        return ExpertBatch("padded", rows, counts=counts), positions

    def expand_rows(self, tokens: Tokens, slot: int) -> tuple[ExpertBatch, Tensor]:
        assert tokens.scales is not None
        counts, positions = self._place(tokens.ids)
        rows = self._spread("rows", tokens.data.view(torch.uint8), positions, slot).view(tokens.data.dtype)
        scales = self._spread("scales", tokens.scales, positions, slot)
        return ExpertBatch("padded", rows, counts=counts, scales=scales, dtype=self._dtype), positions

    def _spread(self, name: str, values: Tensor, positions: Tensor, slot: int) -> Tensor:
        """[E, capacity, .]"""
        room = self._num_experts * self._capacity
        rows = self._workspace.take(name, slot, (room + 1, values.shape[1]), values.dtype)
        rows[positions] = values.unsqueeze(1)
        return rows[:-1].view(self._num_experts, self._capacity, -1)

    def _place(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """counts [E], positions [N, K]."""
        num_experts = self._num_experts
        experts = ids.remainder(num_experts + 1).long()  # [N, K], E if not local
        named = torch.zeros(len(experts), num_experts + 1, dtype=torch.int64, device=experts.device)
        so_far = named.scatter_(1, experts, 1).cumsum(0)  # [N, E + 1] counts up to and including this token
        counts = so_far[-1, :-1].to(torch.int32)
        # index -1 is the last row, one beyond the batch: receives non-local choices
        positions = so_far.add_(self._bases).gather(1, experts).clamp_min_(-1)
        return counts, positions

    def reduce(self, rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
        return sum_rows_static(rows.flatten(0, 1), positions, weights)
