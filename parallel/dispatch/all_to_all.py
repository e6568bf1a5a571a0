"""Exchanges over all_to_all: a token crosses once to a rank, however many of its experts are there; one sum returns.

Legend: T tokens of this rank, N tokens arrived, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.parallel.collectives import Group
from moe_engine.parallel.dispatch.payload import RecordFormat
from moe_engine.parallel.dispatch.protocol import DispatchShape, Tokens
from moe_engine.parallel.dispatch.rows import local_ids, owner_mask, sum_rows
from moe_engine.parallel.dispatch.workspace import Workspace


@dataclass(frozen=True)
class VariableWay:
    """How the sums come back: the rows sent to and received from each rank, and where each token's copies went."""

    slot: int
    positions: Tensor  # int64 [T, R] row among those sent, -1: not sent to that rank
    num_sent: list[int]
    num_received: list[int]


@dataclass(frozen=True)
class StaticWay:
    slot: int
    num_tokens: int  # T


class VariableAllToAll:
    """As many rows as there are: one exchange of sizes, one of tokens; the host waits for the sizes. For prefill."""

    def __init__(self, group: Group, shape: DispatchShape) -> None:
        self._group = group
        self._num_local = shape.num_local
        self._format = RecordFormat.of(shape)
        self._workspace = Workspace(group.device)

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, VariableWay]:
        mask = owner_mask(tokens.ids, self._num_local, self._group.size)  # [T, R]
        counts = mask.sum(0)
        num_sent: list[int] = counts.tolist()
        num_received = self._group.exchange_ints(num_sent)
        sources = mask.t().nonzero()[:, 1]  # [sum(num_sent)] by rank, then by token
        positions = torch.where(mask, mask.cumsum(0) - 1 + (counts.cumsum(0) - counts), -1)

        packed = self._take("packed", slot, len(tokens.ids))
        self._format.write(tokens, packed)
        sent = self._take("sent", slot, len(sources))
        torch.index_select(packed, 0, sources, out=sent)
        received = self._take("received", slot, sum(num_received))
        self._group.all_to_all(received, sent, num_received, num_sent)

        arrived = self._format.view(received)
        ids = local_ids(arrived.ids, self._group.rank, self._num_local)
        way = VariableWay(slot, positions, num_sent, num_received)
        return Tokens(arrived.data, arrived.scales, ids, arrived.weights), way

    def collect(self, partial: Tensor, way: VariableWay) -> Tensor:
        shape = (sum(way.num_sent), partial.shape[1])
        returned = self._workspace.take("returned", way.slot, shape, partial.dtype)
        self._group.all_to_all(returned, partial, way.num_sent, way.num_received)
        return sum_rows(returned, way.positions)

    def _take(self, name: str, slot: int, num_rows: int) -> Tensor:
        return self._workspace.take(name, slot, (num_rows, self._format.num_bytes), torch.uint8)


class StaticAllToAll:
    """`shape.max_tokens` rows for every pair of ranks: no sizes to exchange, shapes that depend on no value, and a host
    that never waits. For decode, made for the size M of its batch.

    Every token goes to every rank in its own row: with room for all, leaving some out would save no byte, and finding
    out which costs more than it saves.
    """

    def __init__(self, group: Group, shape: DispatchShape) -> None:
        self._group = group
        self._max_tokens = shape.max_tokens
        rows = torch.arange(group.size * shape.max_tokens, device=group.device)
        self._own_rows = rows.view(group.size, -1).t().contiguous()  # [M, R]: a token's, among those returned
        self._num_local = shape.num_local
        self._format = RecordFormat.of(shape)
        self._workspace = Workspace(group.device)

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, StaticWay]:
        num_tokens, shape = len(tokens.ids), (self._group.size, self._max_tokens, self._format.num_bytes)
        sent = self._workspace.take("sent", slot, shape, torch.uint8)
        self._format.write(tokens, sent[0, :num_tokens])
        self._format.view(sent[0, num_tokens:]).ids.fill_(-1)
        sent[1:] = sent[0]
        received = self._workspace.take("received", slot, shape, torch.uint8)
        self._group.all_to_all(received, sent)

        arrived = self._format.view(received.flatten(0, 1))
        ids = local_ids(arrived.ids, self._group.rank, self._num_local)
        return Tokens(arrived.data, arrived.scales, ids, arrived.weights), StaticWay(slot, num_tokens)

    def collect(self, partial: Tensor, way: StaticWay) -> Tensor:
        shape = (self._group.size, self._max_tokens, partial.shape[1])
        returned = self._workspace.take("returned", way.slot, shape, partial.dtype)
        self._group.all_to_all(returned, partial.view(shape))
        return F.embedding_bag(self._own_rows[: way.num_tokens], returned.flatten(0, 1), mode="sum")
