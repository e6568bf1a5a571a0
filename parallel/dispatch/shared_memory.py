"""Dispatch among ranks of one host through shared memory: tokens are written once, and read in place.

A rank publishes its tokens and raises a flag; every rank reads the choices of all ranks and copies the rows it needs.
Sums are published in the same way. There are no messages and no locks: two sets of regions alternate, and a set is
rewritten only after its combine, which no rank can finish before all ranks have read.
Legend: T tokens of this rank, N received, M max tokens of a rank, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.permutation.protocol import Permutation
from moe_engine.parallel.collectives import Group
from moe_engine.parallel.dispatch.buffers import RecordBuffer
from moe_engine.parallel.dispatch.expert_ids import live_ranks
from moe_engine.parallel.dispatch.payload import RecordFormat
from moe_engine.parallel.dispatch.protocol import NUM_LIVE, DispatchShape, Tokens
from moe_engine.parallel.shared_segment import SharedSegment

TOKENS, SUMS = 0, 1  # the two flags of a slot


@dataclass(frozen=True)
class Handle:
    slot: int
    positions: Tensor  # int32 [T, R]: each token's index among all ranks' rows, by rank, then by token; -1: none
    firsts: np.ndarray  # int64 [R]: the first index of each rank
    starts: np.ndarray  # int64 [R]: start of the sums for each rank's tokens in this rank's sums


class _Region:
    """One slot's region of the shared memory."""

    def __init__(self, memory: Tensor, sizes: list[int], shape: DispatchShape, rank: int) -> None:
        ranks = shape.num_ranks
        head, self.records, sums = (part[:size] for part, size in zip(memory.split(_aligned(sizes)), sizes))
        words = head.numpy().view(np.int64).reshape(ranks + 1, ranks)
        self.counts = words[0]  # [R] tokens of each rank
        self.starts = words[1:]  # [R, R]: owner of the sums, owner of the tokens
        self.own = self.records.view(ranks, -1)[rank]  # uint8 [M * record]; `records` holds those of every rank
        self.sums = sums.view(shape.dtype).view(ranks * ranks * shape.max_tokens, shape.hidden)
        """By owner of the sums, then in order of arrival."""


class SharedMemory:
    """Reads and writes a `SharedSegment`. The constructor is collective."""

    def __init__(self, group: Group, shape: DispatchShape, permutation: Permutation) -> None:
        self._group = group
        self._permutation = permutation
        self._max_sums = group.size * shape.max_tokens  # max sums of a rank
        self._experts = group.rank * shape.num_local, shape.num_local
        self._live = live_ranks(group)
        self._numbers = torch.arange(shape.max_tokens, dtype=torch.int32).unsqueeze(1)
        self._form = form = RecordFormat.of(shape)
        self._records = form.records
        self._begins = [rank * shape.max_tokens * form.num_bytes for rank in range(group.size)]
        ranks, num_rows = group.size, self._max_sums
        sums = ranks * num_rows * shape.hidden * shape.dtype.itemsize
        sizes = [(ranks + 1) * ranks * 8, num_rows * form.num_bytes, sums]
        one = sum(_aligned(sizes))
        self._segment = SharedSegment(group, NUM_LIVE * one, num_flags=2 * NUM_LIVE)
        parts = self._segment.bytes.split([one] * NUM_LIVE)
        self._regions = [_Region(part, sizes, shape, group.rank) for part in parts]
        self._taken = [RecordBuffer(form, group.device) for _ in range(NUM_LIVE)]
        self._turn = [0] * NUM_LIVE
        group.barrier()

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, Handle]:
        region, num_tokens = self._regions[slot], len(tokens.ids)
        self._permutation.pack(self._form.parts(tokens), self._numbers[:num_tokens], [0], self._records, region.own)
        region.counts[self._group.rank] = num_tokens
        self._turn[slot] += 1
        self._raise_flag(slot, TOKENS)
        positions, num_rows = self._permutation.route(tokens.ids, self._experts[1], self._live)
        self._wait(slot, TOKENS, "dispatch through shared memory")

        counts: list[int] = region.counts.tolist()  # 0 for a lost rank, which never wrote
        records, _ = self._taken[slot].take(sum(counts))
        taken = self._permutation.take(region.records, self._begins, counts, self._records, self._experts, records)
        _, arrived = self._taken[slot].take(sum(taken))
        return arrived, Handle(slot, positions, _firsts(num_rows.tolist()), _firsts(taken))

    def collect(self, partial: Tensor, handle: Handle) -> Tensor:
        region, rank = self._regions[handle.slot], self._group.rank
        region.sums[rank * self._max_sums :][: len(partial)].copy_(partial)
        region.starts[rank] = handle.starts
        self._raise_flag(handle.slot, SUMS)
        self._wait(handle.slot, SUMS, "combine through shared memory")

        shifts = np.arange(self._group.size) * self._max_sums + region.starts[:, rank] - handle.firsts
        numbers = handle.positions.numpy()
        positions = np.where(numbers >= 0, numbers + shifts, -1).astype(np.int32)
        return self._permutation.combine(region.sums, torch.from_numpy(positions))

    def _raise_flag(self, slot: int, flag: int) -> None:
        """Raises this rank's flag of the slot."""
        self._segment.raise_flag(2 * slot + flag, self._turn[slot])

    def _wait(self, slot: int, flag: int, operation: str) -> None:
        """Returns when every rank has raised the flag."""
        self._segment.wait(2 * slot + flag, self._turn[slot], operation)


def _firsts(counts: list[int]) -> np.ndarray:
    """Exclusive prefix sums: int64."""
    return np.cumsum(counts) - counts


def _aligned(sizes: list[int]) -> list[int]:
    """Rounds sizes up to pages."""
    return [-(-size // 4096) * 4096 for size in sizes]
