"""Dispatch by all_gather: every rank gets all tokens, computes its experts' share, and the shares are summed.

Moves R times the tokens whatever the choices, in two plain collectives: best for few ranks or K near R.
Legend: T tokens of this rank, M rows sent by each rank, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_engine.parallel.collectives import Group
from moe_engine.parallel.dispatch.payload import RecordFormat
from moe_engine.parallel.dispatch.protocol import DispatchShape, Tokens
from moe_engine.parallel.dispatch.rows import local_ids, without_lost
from moe_engine.parallel.dispatch.workspace import Workspace


@dataclass(frozen=True)
class Handle:
    num_tokens: int  # T
    num_rows: int  # M


class AllGather:
    """all_gather the tokens, reduce_scatter the sums.

    Args:
        static: every rank sends `shape.max_tokens` rows in every call, and the host never waits (low latency); else the
            largest token count of any rank, which is exchanged first (normal).
    """

    def __init__(self, group: Group, shape: DispatchShape, static: bool) -> None:
        self._group = group
        self._num_rows = shape.max_tokens if static else None
        self._num_local = shape.num_local
        self._format = RecordFormat.of(shape)
        self._workspace = Workspace(group.device)

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, Handle]:
        num_tokens = len(tokens.ids)
        num_rows = self._num_rows
        if num_rows is None:
            num_rows = max(self._group.exchange_ints([num_tokens] * self._group.size))
        packed = self._workspace.take("packed", slot, (num_rows, self._format.num_bytes), torch.uint8)
        self._format.write(tokens, packed[:num_tokens])
        self._format.view(packed[num_tokens:]).ids.fill_(-1)
        arrived = self._format.view(self._group.all_gather(packed).flatten(0, 1))
        ids = without_lost(arrived.ids, self._group.alive)
        ids = local_ids(ids, self._group.rank, self._num_local)
        return Tokens(arrived.data, arrived.scales, ids, arrived.weights), Handle(num_tokens, num_rows)

    def collect(self, partial: Tensor, handle: Handle) -> Tensor:
        shares = partial.view(self._group.size, handle.num_rows, partial.shape[1])
        return self._group.reduce_scatter(shares)[: handle.num_tokens]
