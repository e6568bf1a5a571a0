"""The exchange among ranks of one host: tokens are written once, and read where they lie.

A rank publishes its tokens and raises a flag; every rank reads the choices of all and takes the rows it needs. Sums
are published alike. Nothing is sent, and a rank that reads never disturbs the one that wrote: two sets of regions take
turns, and a set is written again only after its combine, which every rank can finish only when all have read.
Legend: T tokens of this rank, N arrived, M most tokens of a rank, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_engine.parallel.collectives import Group
from moe_engine.parallel.dispatch.host_rows import GrowingRecords, local_ids, ranks_of, sum_bags
from moe_engine.parallel.dispatch.payload import RecordFormat, write_parts
from moe_engine.parallel.dispatch.protocol import NUM_LIVE, DispatchShape, Tokens
from moe_engine.parallel.dispatch.shared_segment import SharedSegment

TOKENS, SUMS = 0, 1  # the two flags of a slot


@dataclass(frozen=True)
class Way:
    slot: int
    mask: np.ndarray  # bool [R, T]: ranks that hold an expert of the token
    starts: np.ndarray  # int64 [R]: where the sums for each rank's tokens begin among this rank's sums


class _Region:
    """One slot's part of the shared memory."""

    def __init__(self, memory: Tensor, sizes: list[int], form: RecordFormat, shape: DispatchShape, rank: int) -> None:
        ranks = shape.num_ranks
        head, tokens, sums = (part[:size] for part, size in zip(memory.split(_aligned(sizes)), sizes))
        words = head.numpy().view(np.int64).reshape(ranks + 1, ranks)
        self.counts = words[0]  # [R] tokens that each rank brings
        self.starts = words[1:]  # [R, R]: owner of the sums, owner of the tokens
        records = tokens.view(ranks, shape.max_tokens, -1)
        self.records = records.numpy()  # uint8 [R, M, record]
        self.ids = [form.view(of_rank).ids.numpy() for of_rank in records]  # int32 [M, K] of each rank
        self.own = form.view(records[rank])
        self.sums = sums.view(shape.dtype).view(ranks * ranks * shape.max_tokens, shape.hidden)
        """Owner of the sums, then as they arrived there."""


class SharedMemory:
    """Reads and writes a `SharedSegment`. Collective to make."""

    def __init__(self, group: Group, shape: DispatchShape) -> None:
        self._group = group
        self._num_local = shape.num_local
        self._room = group.size * shape.max_tokens  # of the sums of a rank
        form = RecordFormat.of(shape)
        ranks, rows = group.size, self._room
        sizes = [(ranks + 1) * ranks * 8, rows * form.num_bytes, ranks * rows * shape.hidden * shape.dtype.itemsize]
        one = sum(_aligned(sizes))
        self._segment = SharedSegment(group, NUM_LIVE * one, num_flags=2 * NUM_LIVE)
        parts = self._segment.bytes.split([one] * NUM_LIVE)
        self._regions = [_Region(part, sizes, form, shape, group.rank) for part in parts]
        self._taken = [GrowingRecords(form) for _ in range(NUM_LIVE)]
        self._turn = [0] * NUM_LIVE
        group.barrier()

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, Way]:
        region, num_tokens, rank = self._regions[slot], len(tokens.ids), self._group.rank
        write_parts(tokens, region.own.first(num_tokens))
        region.counts[rank] = num_tokens
        self._turn[slot] += 1
        self._meet(slot, TOKENS, "dispatch through shared memory")

        counts: list[int] = region.counts.tolist()  # of a rank that was lost: 0, it never wrote any
        ids = [local_ids(of_rank[:count], rank, self._num_local) for of_rank, count in zip(region.ids, counts)]
        here = [np.flatnonzero((of_rank >= 0).any(1)) for of_rank in ids]
        num_rows = [len(rows) for rows in here]
        records, arrived = self._taken[slot].take(sum(num_rows))
        starts = np.cumsum([0, *num_rows])
        for source, rows in enumerate(here):
            into = records[starts[source] : starts[source + 1]]
            np.take(region.records[source], rows, axis=0, out=into, mode="clip")
        found = np.concatenate([of_rank[rows] for of_rank, rows in zip(ids, here)])
        mask = ranks_of(tokens.ids.numpy(), self._num_local, self._group.size)
        taken = Tokens(arrived.data, arrived.scales, torch.from_numpy(found), arrived.weights)
        return taken, Way(slot, mask, starts[:-1])

    def collect(self, partial: Tensor, way: Way) -> Tensor:
        region, rank = self._regions[way.slot], self._group.rank
        region.sums[rank * self._room :][: len(partial)].copy_(partial)
        region.starts[rank] = way.starts
        self._meet(way.slot, SUMS, "combine through shared memory")

        bases = np.arange(self._group.size) * self._room + region.starts[:, rank]
        rows = way.mask.cumsum(1) + (bases - 1)[:, None]  # [R, T]
        return sum_bags(region.sums, rows.T[way.mask.T], way.mask.sum(0))

    def _meet(self, slot: int, flag: int, operation: str) -> None:
        """Returns when every rank has come as far in this slot."""
        self._segment.raise_flag(2 * slot + flag, self._turn[slot])
        self._segment.wait(2 * slot + flag, self._turn[slot], operation)


def _aligned(sizes: list[int]) -> list[int]:
    """To pages."""
    return [-(-size // 4096) * 4096 for size in sizes]
