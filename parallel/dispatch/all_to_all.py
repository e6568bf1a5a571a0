"""Dispatch over all_to_all: a token is sent once per target rank, for all its experts there; one sum returns.

Legend: T tokens of this rank, N received tokens, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_engine.kernels.permutation.protocol import Permutation
from moe_engine.parallel.collectives import Group
from moe_engine.parallel.dispatch.buffers import RecordBuffer, RowBuffer
from moe_engine.parallel.dispatch.expert_ids import live_ranks, without_lost
from moe_engine.parallel.dispatch.payload import RecordFormat, write_parts
from moe_engine.parallel.dispatch.protocol import NUM_LIVE, DispatchShape, Tokens


@dataclass(frozen=True)
class VariableHandle:
    """Combine handle: the rows sent to and received from each rank, and the positions of each token's copies."""

    slot: int
    positions: Tensor  # int32 [T, R] row in the send buffer, -1: not sent to that rank
    num_sent: list[int]
    num_received: list[int]


@dataclass(frozen=True)
class StaticHandle:
    slot: int
    num_tokens: int  # T


class VariableAllToAll:
    """Exact row counts: one exchange of sizes, one of tokens; the host waits for the sizes. For prefill."""

    def __init__(self, group: Group, shape: DispatchShape, permutation: Permutation) -> None:
        self._group = group
        self._permutation = permutation
        self._num_local = shape.num_local
        self._live = live_ranks(group)
        form = RecordFormat.of(shape)
        self._packed, self._sent = (RecordBuffer(form, group.device) for _ in range(2))
        self._received = [RecordBuffer(form, group.device) for _ in range(NUM_LIVE)]
        self._returned = [RowBuffer(shape.hidden, shape.dtype, group.device) for _ in range(NUM_LIVE)]

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, VariableHandle]:
        positions, counts = self._permutation.route(tokens.ids, self._num_local, self._live)
        num_sent, num_received = self._exchange_sizes(counts)
        packed, parts = self._packed.take(len(tokens.ids))
        write_parts(tokens, parts)
        sent, _ = self._sent.take(sum(num_sent))
        self._permutation.permute(packed, positions, sent)
        received, arrived = self._received[slot].take(sum(num_received))
        self._group.all_to_all(received, sent, num_received, num_sent)
        handle = VariableHandle(slot, positions, num_sent, num_received)
        return arrived.with_ids(arrived.ids - self._group.rank * self._num_local), handle

    def _exchange_sizes(self, num_sent: Tensor) -> tuple[list[int], list[int]]:
        """Rows sent to each rank, and received from it. The only synchronization with the device."""
        sizes = torch.stack((num_sent, torch.zeros_like(num_sent)))
        self._group.all_to_all(sizes[1], sizes[0])
        sent, received = sizes.tolist()
        return sent, received

    def collect(self, partial: Tensor, handle: VariableHandle) -> Tensor:
        returned = self._returned[handle.slot].take(sum(handle.num_sent))
        self._group.all_to_all(returned, partial, handle.num_sent, handle.num_received)
        return self._permutation.combine(returned, handle.positions)


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
        form, num_sums = RecordFormat.of(shape), shape.max_tokens * group.size
        self._sent = RecordBuffer(form, group.device)
        self._received = [RecordBuffer(form, group.device) for _ in range(NUM_LIVE)]
        self._returned = [
            torch.empty(num_sums, shape.hidden, dtype=shape.dtype, device=group.device).unflatten(0, (group.size, -1))
            for _ in range(NUM_LIVE)
        ]

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, StaticHandle]:
        num_tokens, num_rows = len(tokens.ids), self._max_tokens * self._group.size
        sent, parts = self._sent.take(num_rows)
        write_parts(tokens, parts.first(num_tokens))
        if num_tokens < self._max_tokens:
            parts.ids[num_tokens : self._max_tokens] = -1
        of_ranks = sent.view(self._group.size, self._max_tokens, -1)
        of_ranks[1:] = of_ranks[0]
        received, arrived = self._received[slot].take(num_rows)
        self._group.all_to_all(received, sent)

        ids = without_lost(arrived.ids, self._group.alive) - self._group.rank * self._num_local
        return arrived.with_ids(ids), StaticHandle(slot, num_tokens)

    def collect(self, partial: Tensor, handle: StaticHandle) -> Tensor:
        returned = self._returned[handle.slot]
        self._group.all_to_all(returned, partial.view(returned.shape))
        return returned[:, : handle.num_tokens].sum(0)
