"""The exchange among ranks of one host: tokens are written once, and read where they lie.

A rank publishes its tokens and raises a flag; every rank reads the choices of all and takes the rows it needs. Sums
are published alike. Nothing is sent, and a rank that reads never disturbs the one that wrote: two sets of regions take
turns, and a set is written again only after its combine, which every rank can finish only when all have read.
Legend: T tokens of this rank, N arrived, M most tokens of a rank, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_engine.parallel.collectives import Group
from moe_engine.parallel.dispatch.payload import RecordFormat
from moe_engine.parallel.dispatch.protocol import NUM_LIVE, DispatchShape, Tokens
from moe_engine.parallel.dispatch.rows import local_ids, owner_mask, sum_rows
from moe_engine.parallel.dispatch.shared_segment import SharedSegment
from moe_engine.parallel.dispatch.workspace import Workspace


@dataclass(frozen=True)
class Way:
    slot: int
    mask: Tensor  # bool [T, R]: ranks that hold an expert of the token
    starts: Tensor  # int64 [R]: where the sums for each rank's tokens begin among this rank's sums


class SharedMemory:
    """Reads and writes a `SharedSegment`.

    Args:
        static: deliver all R * M rows in every call (low latency) instead of those with an expert here (normal).
    """

    def __init__(self, group: Group, shape: DispatchShape, static: bool) -> None:
        self._group = group
        self._static = static
        self._max_tokens = shape.max_tokens
        self._num_local = shape.num_local
        self._format = RecordFormat.of(shape)
        self._workspace = Workspace(group.device)
        ranks, rows = group.size, group.size * shape.max_tokens
        parts = [rows * self._format.num_bytes, ranks * ranks * 8, ranks * rows * shape.hidden * shape.dtype.itemsize]
        aligned = [-(-size // 4096) * 4096 for size in parts]
        self._segment = SharedSegment(group, NUM_LIVE * sum(aligned), num_flags=2 * NUM_LIVE)
        self._records: list[Tensor] = []  # [R * M, record] of each slot, uint8
        self._starts: list[Tensor] = []  # [R, R] int64: owner of the sums, owner of the tokens
        self._sums: list[Tensor] = []  # [R * R * M, D]: owner of the sums, then as they arrived there
        for memory in self._segment.bytes.split([sum(aligned)] * NUM_LIVE):
            tokens, starts, sums = (part[:size] for part, size in zip(memory.split(aligned), parts))
            self._records.append(tokens.view(rows, -1))
            self._starts.append(starts.view(torch.int64).view(ranks, ranks))
            self._sums.append(sums.view(shape.dtype).view(ranks * rows, shape.hidden))
        writers = {group.rank, *self._segment.lost}
        for records in self._records:  # what is never written carries no expert
            for rank in writers:
                self._format.view(self._of(records, rank)).ids.fill_(-1)
        self._turn = [0] * NUM_LIVE
        group.barrier()

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, Way]:
        num_tokens = len(tokens.ids)
        own = self._of(self._records[slot], self._group.rank)
        self._format.write(tokens, own[:num_tokens])
        self._format.view(own[num_tokens:]).ids.fill_(-1)
        self._turn[slot] += 1
        self._segment.raise_flag(2 * slot, self._turn[slot])
        self._segment.wait(2 * slot, self._turn[slot], "dispatch through shared memory")

        records = self._records[slot]
        ids = local_ids(self._format.view(records).ids, self._group.rank, self._num_local)
        if self._static:
            starts = torch.arange(self._group.size) * self._max_tokens
        else:
            here = (ids >= 0).any(1)  # [R * M]
            rows = here.nonzero().squeeze(1)
            counts = here.view(self._group.size, -1).sum(1)
            starts = counts.cumsum(0) - counts
            ids = ids[rows]
            taken = self._workspace.take("records", slot, (len(rows), records.shape[1]), torch.uint8)
            records = torch.index_select(records, 0, rows, out=taken)
        arrived = self._format.view(records)
        mask = owner_mask(tokens.ids, self._num_local, self._group.size)
        return Tokens(arrived.data, arrived.scales, ids, arrived.weights), Way(slot, mask, starts)

    def collect(self, partial: Tensor, way: Way) -> Tensor:
        slot, rank, all_rows = way.slot, self._group.rank, self._group.size * self._max_tokens
        sums = self._sums[slot]
        sums[rank * all_rows :][: len(partial)].copy_(partial)
        self._starts[slot][rank].copy_(way.starts)
        self._segment.raise_flag(2 * slot + 1, self._turn[slot])
        self._segment.wait(2 * slot + 1, self._turn[slot], "combine through shared memory")

        bases = torch.arange(self._group.size) * all_rows + self._starts[slot][:, rank]
        number = torch.arange(len(way.mask)).unsqueeze(1) if self._static else way.mask.cumsum(0) - 1
        return sum_rows(sums, torch.where(way.mask, number + bases, -1))

    def _of(self, records: Tensor, rank: int) -> Tensor:
        return records[rank * self._max_tokens :][: self._max_tokens]
