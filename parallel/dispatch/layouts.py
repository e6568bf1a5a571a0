"""From arrived tokens to the experts' rows and back, on one rank.

Legend: N tokens arrived, K experts per token, E experts of this rank, D hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.parallel.dispatch.payload import decode
from moe_engine.parallel.dispatch.protocol import Tokens
from moe_engine.parallel.dispatch.rows import sum_rows, sum_rows_static
from moe_engine.parallel.dispatch.workspace import Workspace


class GroupedLayout:
    """`grouped`: one row for each (token, choice) that is here, sorted by expert, by arrival inside an expert."""

    def __init__(self, num_experts: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_experts = num_experts
        self._dtype = dtype
        self._workspace = Workspace(device)

    def expand(self, tokens: Tokens, slot: int) -> tuple[ExpertBatch, Tensor]:
        data = decode(tokens, self._dtype)
        flat = tokens.ids.flatten().long()  # [N * K]
        here = flat >= 0
        pairs = here.nonzero().squeeze(1)
        experts = flat[pairs]
        order = pairs[torch.argsort(experts, stable=True)]  # [M]
        offsets = F.pad(torch.bincount(experts, minlength=self._num_experts).cumsum(0), (1, 0)).to(torch.int32)
        positions = torch.full_like(flat, -1)
        positions[order] = torch.arange(len(order), device=flat.device)
        rows = self._workspace.take("rows", slot, (len(order), data.shape[1]), self._dtype)
        torch.index_select(data, 0, order // tokens.ids.shape[1], out=rows)
        return ExpertBatch("grouped", rows, offsets=offsets), positions.view(tokens.ids.shape)

    def reduce(self, rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
        return sum_rows(rows, positions, weights)


class PaddedLayout:
    """`padded`: [E, capacity, D] with counts on the device; shapes depend on no value and the host never waits.

    Args:
        capacity: rows for each expert. Tokens name an expert at most once, so as many as tokens can arrive.
    """

    def __init__(self, num_experts: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_experts = num_experts
        self._capacity = capacity
        self._experts = torch.arange(num_experts + 1, device=device)
        self._dtype = dtype
        self._workspace = Workspace(device)

    def expand(self, tokens: Tokens, slot: int) -> tuple[ExpertBatch, Tensor]:
        num_experts, capacity = self._num_experts, self._capacity
        data = decode(tokens, self._dtype)
        ids = tokens.ids.long()  # [N, K]
        # -1 sorts first and, as an index, names the last row: one beyond the batch, for whatever is not here
        ordered, order = ids.flatten().sort(stable=True)
        starts = torch.searchsorted(ordered, self._experts)  # [E + 1]
        counts = starts.diff().clamp_max_(capacity).to(torch.int32)  # more only if a token names an expert twice
        place = torch.arange(len(order), device=order.device).sub_(starts[ordered])
        fits = (ordered >= 0) & (place < capacity)
        positions = torch.empty_like(order)
        positions[order] = torch.where(fits, ordered * capacity + place, -1)
        positions = positions.view(ids.shape)
        rows = self._workspace.take("rows", slot, (num_experts * capacity + 1, data.shape[1]), self._dtype)
        rows[positions] = data.unsqueeze(1)
        return ExpertBatch("padded", rows[:-1].view(num_experts, capacity, -1), counts=counts), positions

    def reduce(self, rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
        return sum_rows_static(rows.flatten(0, 1), positions, weights)
