"""Dispatch by all_gather: every rank gets all tokens, computes its experts' share, and the shares are summed.

Moves R times the tokens whatever the choices, in two plain collectives: best for few ranks or K near R.
Legend: T tokens of this rank, M rows sent by each rank, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe_engine.parallel.collectives import Group
from moe_engine.parallel.dispatch.buffers import RecordBuffer
from moe_engine.parallel.dispatch.expert_ids import without_lost
from moe_engine.parallel.dispatch.payload import RecordFormat, write_parts
from moe_engine.parallel.dispatch.protocol import DispatchShape, Tokens


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
        self._packed = RecordBuffer(self._format, group.device)

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, Handle]:
        num_tokens = len(tokens.ids)
        num_rows = self._num_rows
        if num_rows is None:
            num_rows = max(self._group.exchange_ints([num_tokens] * self._group.size))
        packed, parts = self._packed.take(num_rows)
        write_parts(tokens, parts.first(num_tokens))
        parts.ids[num_tokens:] = -1
        arrived = self._format.view(self._group.all_gather(packed).flatten(0, 1))
        ids = without_lost(arrived.ids, self._group.alive) - self._group.rank * self._num_local
        return arrived.with_ids(ids), Handle(num_tokens, num_rows)

    def collect(self, partial: Tensor, handle: Handle) -> Tensor:
        shares = partial.view(self._group.size, handle.num_rows, partial.shape[1])
        return self._group.reduce_scatter(shares)[: handle.num_tokens]
