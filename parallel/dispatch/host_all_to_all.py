"""Dispatch over all_to_all for CPU ranks (gloo): usually one message out and one back.

A token is sent once per target rank, and byte counts are exact in both modes. The receiver does not know a sender's row
count; this works because gloo accepts messages shorter than the receive buffer: each pair of ranks has a buffer of
fixed size, and a message begins with a header that holds its row count. If any rank has more tokens than a buffer
holds, all ranks read that from the headers and send the rows in a second message of known sizes.

Legend: T tokens of this rank, N received tokens, R ranks, A live ranks other than this one.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.permutation.protocol import Permutation
from moe_engine.parallel.collectives import Group
from moe_engine.parallel.dispatch.all_to_all import VariableHandle
from moe_engine.parallel.dispatch.buffers import RecordBuffer, RowBuffer
from moe_engine.parallel.dispatch.expert_ids import live_ranks
from moe_engine.parallel.dispatch.payload import RecordFormat
from moe_engine.parallel.dispatch.protocol import NUM_LIVE, DispatchShape, Tokens

HEAD_BYTES = 16
"""Message header: rows in the message, and tokens of the sender; int64."""


class HostAllToAll:
    """For groups whose `all_to_all` accepts fewer rows than the receive buffer holds.

    Args:
        room_tokens: max tokens per rank for a single message.
    """

    def __init__(self, group: Group, shape: DispatchShape, room_tokens: int, permutation: Permutation) -> None:
        self._group = group
        self._permutation = permutation
        self._live = live_ranks(group)
        self._away = [rank for rank in self._live.nonzero().flatten().tolist() if rank != group.rank]  # [A]
        self._experts = group.rank * shape.num_local, shape.num_local
        self._room_tokens = min(room_tokens, shape.max_tokens)
        self._form = form = RecordFormat.of(shape)
        self._records = form.records
        self._leaving = RecordBuffer(form, group.device)
        self._arrived = [RecordBuffer(form, group.device) for _ in range(NUM_LIVE)]
        self._returned = [RowBuffer(shape.hidden, shape.dtype, group.device) for _ in range(NUM_LIVE)]

        # one block: send buffers, receive buffers, and local rows
        room, num_away = HEAD_BYTES + self._room_tokens * form.num_bytes, len(self._away)
        self._room_bytes = [room if rank in self._away else 0 for rank in range(group.size)]
        self._memory = torch.empty((2 * num_away + 1) * room, dtype=torch.uint8)
        self._sent, self._received, _ = self._memory.split([num_away * room, num_away * room, room])
        self._sent_words = self._sent.numpy().view(np.int64)
        self._heads = self._received.numpy().reshape(num_away, room)[:, :HEAD_BYTES].view(np.int64)  # [A, 2]
        self._begins = [2 * num_away * room] * group.size  # byte offset of the rows from each rank
        for number, rank in enumerate(self._away, start=num_away):
            self._begins[rank] = number * room + HEAD_BYTES

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, VariableHandle]:
        group, num_tokens = self._group, len(tokens.ids)
        positions, counts = self._permutation.route(tokens.ids, self._experts[1], self._live)
        num_sent: list[int] = counts.tolist()
        parts = self._form.parts(tokens)
        fits = num_tokens <= self._room_tokens
        sizes, bases = self._address(num_sent, num_tokens, fits)
        if fits:
            self._permutation.pack(parts, positions, bases, self._records, self._memory)
        group.all_to_all(self._received, self._sent[: sum(sizes)], self._room_bytes, sizes)
        num_received = [0] * group.size
        num_received[group.rank] = num_sent[group.rank]
        for rank, (count, sender_tokens) in zip(self._away, self._heads.tolist()):
            num_received[rank] = count
            fits = fits and sender_tokens <= self._room_tokens

        records, arrived = self._arrived[slot].take(sum(num_received))
        if fits:
            self._permutation.take(self._memory, self._begins, num_received, self._records, self._experts, records)
        else:
            leaving, _ = self._leaving.take(sum(num_sent))
            self._permutation.pack(parts, positions, [0] * group.size, self._records, leaving)
            group.all_to_all(records, leaving, num_received, num_sent)
            self._permutation.localize(arrived.ids, self._experts)
        return arrived, VariableHandle(slot, positions, num_sent, num_received)

    def collect(self, partial: Tensor, handle: VariableHandle) -> Tensor:
        returned = self._returned[handle.slot].take(sum(handle.num_sent))
        self._group.all_to_all(returned, partial, handle.num_sent, handle.num_received)
        return self._permutation.combine(returned, handle.positions)

    def _address(self, num_sent: list[int], num_tokens: int, fits: bool) -> tuple[list[int], list[int]]:
        """Writes the message headers; rows follow if they fit.

        Returns:
            The sizes of the messages [R], and the offset of each rank's rows relative to the first row [R]; in bytes.
        """
        record, own = self._records.num_bytes, self._group.rank
        sizes, bases, begin, first = [0] * len(num_sent), [0] * len(num_sent), 0, 0
        bases[own] = self._begins[own] - sum(num_sent[:own]) * record
        for rank, count in enumerate(num_sent):
            if self._room_bytes[rank]:
                self._sent_words[begin // 8] = count
                self._sent_words[begin // 8 + 1] = num_tokens
                bases[rank] = begin + HEAD_BYTES - first * record
                sizes[rank] = HEAD_BYTES + count * record * fits
                begin += sizes[rank]
            first += count
        return sizes, bases
