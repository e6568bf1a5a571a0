"""Collectives among CPU ranks of one host: what they sum and gather is read where the others wrote it.

A sum of small tensors through gloo takes as long as its messages: several wake-ups of other threads. Here each rank
copies its part into memory that all share, raises a flag, and reads the parts of the others. Two sets of regions take
turns: a rank writes a set again only after the turn between, which every rank begins when it has read the set before.

Legend: R ranks, S bytes of a rank's region (long tensors take several turns).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from moe_engine.parallel import host_support
from moe_engine.parallel.collectives import DistributedGroup, exchange_ints
from moe_engine.parallel.shared_segment import SharedSegment

REGION = 1 << 20
TURNS = 2
_NARROW = (torch.bfloat16, torch.float16)


class HostGroup:
    """A `Group` over another of the same ranks, which does what is rare. Collective to make.

    Sums of 16-bit floats are made in float32 and rounded once; all ranks get the same bits.

    Raises:
        OSError: the ranks cannot share memory.
    """

    alive: Tensor | None = None
    on_host = True

    def __init__(self, inner: DistributedGroup) -> None:
        self.size, self.rank = inner.size, inner.rank
        self.timeout_s, self.device = inner.timeout_s, inner.device
        self._inner = inner
        self._tell = inner.tell
        extents = self.size * 8  # of what a rank brings to an exchange: where the part for each rank ends
        self._segment = SharedSegment(inner, TURNS * self.size * (extents + REGION), num_flags=1, reserve=True)
        memory = self._segment.bytes.split([TURNS * self.size * extents, TURNS * self.size * REGION])
        self._extents: np.ndarray = memory[0].numpy().view(np.int64).reshape(TURNS, self.size, self.size)
        self._regions: Tensor = memory[1].view(TURNS, self.size, REGION)  # uint8 [2, R, S]
        self._turn = 0
        inner.barrier()

    def all_to_all(
        self, out: Tensor, x: Tensor, out_rows: Sequence[int] | None = None, x_rows: Sequence[int] | None = None
    ) -> None:
        shares = [len(x) // self.size] * self.size if x_rows is None else x_rows
        room = [len(out) // self.size] * self.size if out_rows is None else out_rows
        row_bytes = max(x.nbytes // max(len(x), 1), out.nbytes // max(len(out), 1))
        self._tell("all_to_all", [rows * row_bytes for rows in shares])
        ends = [end * row_bytes for end in accumulate(shares)]
        places = [start * row_bytes for start in accumulate(room, initial=0)]
        mine, into = x.view(torch.uint8).flatten(), out.view(torch.uint8).flatten()
        begin = 0
        while True:
            parts = self._meet(mine[begin : begin + REGION], "all_to_all", ends)
            extents = self._extents[self._turn % TURNS]
            for source in range(self.size):
                start, stop = (int(extents[source, self.rank - 1]) if self.rank else 0), int(extents[source, self.rank])
                low, high = max(start, begin), min(stop, begin + REGION)
                if low < high:
                    at = places[source] + low - start
                    into[at : at + high - low] = parts[source, low - begin : high - begin]
            begin += REGION
            if begin >= extents[:, -1].max():  # the longest: all ranks take as many turns as it needs
                return

    def all_gather(self, x: Tensor) -> Tensor:
        self._tell("all_gather", [x.nbytes] * self.size)
        out = x.new_empty(self.size, *x.shape)
        mine, into = x.contiguous().view(-1).view(torch.uint8), out.view(self.size, -1).view(torch.uint8)
        for begin in range(0, len(mine), REGION):
            part = mine[begin : begin + REGION]
            into[:, begin : begin + len(part)] = self._meet(part, "all_gather")[:, : len(part)]
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x[0], memory_format=torch.contiguous_format)
        self._tell("reduce_scatter", [out.nbytes] * self.size)
        mine, into = x.reshape(self.size, -1), out.view(-1)
        step = REGION // (self.size * x.element_size())
        for begin in range(0, len(into), step):
            part = mine[:, begin : begin + step].contiguous()
            parts = self._meet(part.view(-1).view(torch.uint8), "reduce_scatter")[:, : part.nbytes]
            addends = parts.view(x.dtype).view(self.size, self.size, -1)[:, self.rank]
            _add(addends, into[begin : begin + step])
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._tell("all_reduce", [x.nbytes] * self.size)
        for part in x.view(-1).split(REGION // x.element_size()):
            parts = self._meet(part.view(torch.uint8), "all_reduce")[:, : part.nbytes]
            _add(parts.view(x.dtype), part)
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return self._inner.broadcast(x, source)

    def exchange_ints(self, values: Sequence[int]) -> list[int]:
        return exchange_ints(self, values)

    def barrier(self) -> None:
        self._inner.barrier()

    def check(self) -> None:
        self._inner.check()

    def _meet(self, part: Tensor, operation: str, extents: Sequence[int] | None = None) -> Tensor:
        """Shows the others this rank's bytes; returns what all show, [R, S], until the turn after the next."""
        self._turn += 1
        turn = self._turn % TURNS
        self._regions[turn, self.rank, : len(part)] = part
        if extents is not None:
            self._extents[turn, self.rank] = extents
        self._segment.raise_flag(0, self._turn)
        self._segment.wait(0, self._turn, f"{operation} through shared memory")
        return self._regions[turn]


def through_shared_memory(inner: DistributedGroup) -> HostGroup | DistributedGroup:
    """The group through memory that its ranks share, or as it is where they cannot. Collective over CPU ranks that are
    thought to be on one host; all come to the same."""
    reasons = inner.exchange_ints([int(host_support.why_not() is not None)] * inner.size)
    if any(reasons):
        return inner
    try:
        return HostGroup(inner)
    except OSError:  # by every rank alike: different hosts, or too little of it
        return inner


def _add(parts: Tensor, out: Tensor) -> None:
    """out [N] = the sum of parts [R, N]; it may be what the part of one rank was copied from."""
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)
    else:
        wide = torch.float32 if out.dtype in _NARROW else out.dtype
        out.copy_(parts.sum(0, dtype=wide))
