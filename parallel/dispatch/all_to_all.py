"""Dispatch over all_to_all: a token is sent once per target rank, for all its experts there; one sum returns.

Legend: T tokens of this rank, N received tokens, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_engine.parallel.collectives import Group
from moe_engine.parallel.dispatch.payload import RecordBuffers, RecordFormat, write_parts
from moe_engine.parallel.dispatch.protocol import DispatchShape, Tokens
from moe_engine.parallel.dispatch.rows import local_ids, owner_mask, sum_rows, without_lost
from moe_engine.parallel.dispatch.workspace import Workspace


@dataclass(frozen=True)
class VariableHandle:
    """Combine handle: the rows sent to and received from each rank, and the positions of each token's copies."""

    slot: int
    positions: Tensor  # int64 [T, R] row in the send buffer, -1: not sent to that rank
    num_sent: list[int]
    num_received: list[int]


@dataclass(frozen=True)
class StaticHandle:
    slot: int
    num_tokens: int  # T


class VariableAllToAll:
    """Exact row counts: one exchange of sizes, one of tokens; the host waits for the sizes. For prefill."""

    def __init__(self, group: Group, shape: DispatchShape) -> None:
        self._group = group
        self._num_local = shape.num_local
        self._workspace = Workspace(group.device)
        self._records = RecordBuffers(RecordFormat.of(shape), self._workspace)

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, VariableHandle]:
        mask = owner_mask(tokens.ids, self._num_local, self._group.size)  # [T, R]
        counts = mask.sum(0)
        sizes = torch.stack((counts, torch.zeros_like(counts)))  # sent to each rank, and received from it
        self._group.all_to_all(sizes[1], sizes[0])
        num_sent, num_received = sizes.tolist()  # the only device synchronisation
        places = mask.cumsum(0) - 1 + (counts.cumsum(0) - counts)  # by rank, then by token
        sources = _sources(torch.where(mask, places, sum(num_sent)), sum(num_sent))
        positions = torch.where(mask, places, -1)

        packed, parts = self._records.take("packed", slot, len(tokens.ids))
        write_parts(tokens, parts)
        sent, _ = self._records.take("sent", slot, len(sources))
        torch.index_select(packed, 0, sources, out=sent)
        received, arrived = self._records.take("received", slot, sum(num_received))
        self._group.all_to_all(received, sent, num_received, num_sent)

        ids = local_ids(arrived.ids, self._group.rank, self._num_local)
        handle = VariableHandle(slot, positions, num_sent, num_received)
        return Tokens(arrived.data, arrived.scales, ids, arrived.weights), handle

    def collect(self, partial: Tensor, handle: VariableHandle) -> Tensor:
        shape = (sum(handle.num_sent), partial.shape[1])
        returned = self._workspace.take("returned", handle.slot, shape, partial.dtype)
        self._group.all_to_all(returned, partial, handle.num_sent, handle.num_received)
        return sum_rows(returned, handle.positions, count=len(returned))


def _sources(places: Tensor, count: int) -> Tensor:
    """places [T, R] of each token's copies, `count` if none -> int64 [count]: the token at each position."""
    tokens = torch.arange(len(places), device=places.device).repeat_interleave(places.shape[1])
    return tokens.new_empty(count + 1).scatter_(0, places.flatten(), tokens)[:count]


class StaticAllToAll:
    """`shape.max_tokens` rows for every pair of ranks: no sizes to exchange, static shapes, no host wait. For decode,
    built for the max batch size M.

    Every token goes to every rank in its own row: the static message size is the same either way, and selecting target
    ranks costs more than it saves.
    """

    def __init__(self, group: Group, shape: DispatchShape) -> None:
        self._group = group
        self._max_tokens = shape.max_tokens
        self._num_local = shape.num_local
        self._workspace = Workspace(group.device)
        self._records = RecordBuffers(RecordFormat.of(shape), self._workspace)

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, StaticHandle]:
        num_tokens, num_rows = len(tokens.ids), self._max_tokens * self._group.size
        sent, parts = self._records.take("sent", slot, num_rows)
        write_parts(tokens, parts.first(num_tokens))
        if num_tokens < self._max_tokens:
            parts.ids[num_tokens : self._max_tokens] = -1
        of_ranks = sent.view(self._group.size, self._max_tokens, -1)
        of_ranks[1:] = of_ranks[0]
        received, arrived = self._records.take("received", slot, num_rows)
        self._group.all_to_all(received, sent)

        ids = without_lost(arrived.ids, self._group.alive)
        ids = local_ids(ids, self._group.rank, self._num_local)
        return Tokens(arrived.data, arrived.scales, ids, arrived.weights), StaticHandle(slot, num_tokens)

    def collect(self, partial: Tensor, handle: StaticHandle) -> Tensor:
        shape = (self._group.size, self._max_tokens, partial.shape[1])
        returned = self._workspace.take("returned", handle.slot, shape, partial.dtype)
        self._group.all_to_all(returned, partial.view(shape))
        return returned[:, : handle.num_tokens].sum(0)
