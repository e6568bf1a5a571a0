"""The exchange over all_to_all for ranks whose messages end on the host (gloo): one message out and one back.

A token crosses once to a rank, however many of its experts are there, and the bytes are exact in either mode. How many
rows a rank sends is not known to the one that receives them; here it needs not be, for gloo takes messages that are
shorter than their room: each rank has a fixed room for every other, and a message begins with a head that says how much
of it is filled. Where any rank has more tokens than a room, all see so in the heads and send the rows in a second
message, of sizes that are then known.

Legend: T tokens of this rank, N tokens arrived, R ranks, A ranks that others are sent to: alive, and not this one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_engine.parallel.collectives import Group
from moe_engine.parallel.dispatch.host_rows import GrowingRecords, GrowingRows, local_ids, ranks_of, sum_bags
from moe_engine.parallel.dispatch.payload import RecordFormat, write_parts
from moe_engine.parallel.dispatch.protocol import NUM_LIVE, DispatchShape, Tokens

HEAD_BYTES = 16
"""Of a message: the rows in it, and the tokens of its sender; int64."""
ROOM_TOKENS = 64
"""Of normal mode: more than what Python costs per call are then the bytes."""


@dataclass(frozen=True)
class Way:
    """How the sums come back: the rows sent to and received from each rank, and whose they are."""

    slot: int
    sources: np.ndarray  # int64 [sum(num_sent)] the token of each row, by rank, then by token
    copies: np.ndarray  # int64 [T] rows of each token
    num_sent: list[int]
    num_received: list[int]


class HostAllToAll:
    """Over a group whose `all_to_all` takes fewer rows than there is room for.

    Args:
        room_tokens: up to so many tokens of every rank, all goes in one message.
    """

    def __init__(self, group: Group, shape: DispatchShape, room_tokens: int) -> None:
        lost = [] if group.alive is None else (~group.alive).nonzero().flatten().tolist()
        self._group = group
        self._lost = np.array(lost, dtype=np.int64)
        self._away = [rank for rank in range(group.size) if rank != group.rank and rank not in lost]  # [A]
        self._num_local = shape.num_local
        self._room_tokens = min(room_tokens, shape.max_tokens)
        form = RecordFormat.of(shape)
        self._record_bytes = form.num_bytes
        self._packed, self._leaving = GrowingRecords(form), GrowingRecords(form)
        self._arrived = [GrowingRecords(form) for _ in range(NUM_LIVE)]
        self._returned = [GrowingRows(shape.hidden, shape.dtype) for _ in range(NUM_LIVE)]

        room = HEAD_BYTES + self._room_tokens * form.num_bytes
        self._rooms = [room if rank in self._away else 0 for rank in range(group.size)]
        self._sent = torch.empty(len(self._away) * room, dtype=torch.uint8)
        self._received = torch.empty_like(self._sent)
        rooms = self._received.numpy().reshape(len(self._away), room)
        self._heads = rooms[:, :HEAD_BYTES].view(np.int64)  # [A, 2]
        self._records = rooms[:, HEAD_BYTES:].reshape(len(self._away), self._room_tokens, form.num_bytes)

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, Way]:
        num_tokens = len(tokens.ids)
        mask = ranks_of(tokens.ids.numpy(), self._num_local, self._group.size)  # [R, T]
        mask[self._lost] = False
        num_sent: list[int] = mask.sum(1).tolist()
        sources = mask.nonzero()[1]
        packed, parts = self._packed.take(num_tokens)
        write_parts(tokens, parts)

        fits = num_tokens <= self._room_tokens
        sizes = self._fill(packed, sources, num_sent, num_tokens, fits)
        self._group.all_to_all(self._received, self._sent[: sum(sizes)], self._rooms, sizes)
        num_received = [0] * self._group.size
        num_received[self._group.rank] = num_sent[self._group.rank]
        for rank, (count, theirs) in zip(self._away, self._heads.tolist()):
            num_received[rank] = count
            fits = fits and theirs <= self._room_tokens

        records, arrived = self._arrived[slot].take(sum(num_received))
        if fits:
            self._gather(packed, sources, num_sent, num_received, records)
        else:
            leaving, _ = self._leaving.take(len(sources))
            np.take(packed, sources, axis=0, out=leaving, mode="clip")
            received = torch.from_numpy(records)
            self._group.all_to_all(received, torch.from_numpy(leaving), num_received, num_sent)
        ids = torch.from_numpy(local_ids(arrived.ids.numpy(), self._group.rank, self._num_local))
        way = Way(slot, sources, mask.sum(0), num_sent, num_received)
        return Tokens(arrived.data, arrived.scales, ids, arrived.weights), way

    def collect(self, partial: Tensor, way: Way) -> Tensor:
        returned = self._returned[way.slot].take(len(way.sources))
        self._group.all_to_all(returned, partial, way.num_sent, way.num_received)
        return sum_bags(returned, way.sources.argsort(kind="stable"), way.copies)

    def _fill(
        self, packed: np.ndarray, sources: np.ndarray, num_sent: list[int], num_tokens: int, fits: bool
    ) -> list[int]:
        """Writes the messages, the rows only where they fit; returns their sizes [R]."""
        sizes = [0] * self._group.size
        sent, begin, first = self._sent.numpy(), 0, 0
        for rank, count in enumerate(num_sent):
            if self._rooms[rank]:
                rows = begin + HEAD_BYTES
                end = rows + (count * self._record_bytes if fits else 0)
                sent[begin:rows].view(np.int64)[:] = count, num_tokens
                if end > rows:
                    into = sent[rows:end].reshape(count, self._record_bytes)
                    np.take(packed, sources[first : first + count], axis=0, out=into, mode="clip")
                sizes[rank], begin = end - begin, end
            first += count
        return sizes

    def _gather(
        self,
        packed: np.ndarray,
        sources: np.ndarray,
        num_sent: list[int],
        num_received: list[int],
        out: np.ndarray,
    ) -> None:
        """Puts the rows of the rooms, and this rank's own, one after the other: `out` [N, bytes of a record]."""
        own, rooms, begin = self._group.rank, iter(self._records), 0
        for rank, count in enumerate(num_received):
            into = out[begin : begin + count]
            if self._rooms[rank]:
                into[:] = next(rooms)[:count]
            elif count:
                first = sum(num_sent[:own])
                np.take(packed, sources[first : first + count], axis=0, out=into, mode="clip")
            begin += count
