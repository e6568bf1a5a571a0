"""Shared-memory collectives among CPU ranks of one host.

A gloo all_reduce of small tensors is dominated by its messages: several wake-ups of other threads. Here each rank
copies its part into shared memory, raises a flag, and reads the parts of the other ranks. Two sets alternate:
a rank rewrites a set only after the turn in between, which a rank begins only after reading the previous set.

Legend: R ranks, S bytes of a rank's region (long tensors use several turns).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from moe_engine.errors import ConfigError
from moe_engine.parallel import host_support
from moe_engine.parallel.collectives import DistributedGroup, exchange_ints
from moe_engine.parallel.shared_segment import SharedSegment

REGION = 1 << 20
TURNS = 2
_NARROW = (torch.bfloat16, torch.float16)


class HostGroup:
    """A `Group` over another group of the same ranks, which runs the rare operations. The constructor is collective.

    Sums of 16-bit floats are computed in float32 and rounded once; bit-identical on all ranks.

    Raises:
        ConfigError: the ranks cannot share memory.
    """

    alive: Tensor | None = None
    on_host = True

    def __init__(self, inner: DistributedGroup) -> None:
        self.size, self.rank = inner.size, inner.rank
        self.timeout_s, self.device = inner.timeout_s, inner.device
        self._inner = inner
        self._report = inner.report
        extents = self.size * 8  # per rank: end offsets of its parts for each rank
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
        self._report("all_to_all", [rows * row_bytes for rows in shares])
        ends = [end * row_bytes for end in accumulate(shares)]
        places = [start * row_bytes for start in accumulate(room, initial=0)]
        mine, into = x.view(torch.uint8).flatten(), out.view(torch.uint8).flatten()
        begin = 0
        while True:
            parts = self._publish(mine[begin : begin + REGION], "all_to_all", ends)
            extents = self._extents[self._turn % TURNS]
            for source in range(self.size):
                start, stop = (int(extents[source, self.rank - 1]) if self.rank else 0), int(extents[source, self.rank])
                low, high = max(start, begin), min(stop, begin + REGION)
                if low < high:
                    at = places[source] + low - start
                    into[at : at + high - low] = parts[source, low - begin : high - begin]
            begin += REGION
            if begin >= extents[:, -1].max():  # all ranks use the number of turns of the longest
                return

    def all_gather(self, x: Tensor) -> Tensor:
        self._report("all_gather", [x.nbytes] * self.size)
        out = x.new_empty(self.size, *x.shape)
        mine, into = x.contiguous().view(-1).view(torch.uint8), out.view(self.size, -1).view(torch.uint8)
        for begin in range(0, len(mine), REGION):
            part = mine[begin : begin + REGION]
            into[:, begin : begin + len(part)] = self._publish(part, "all_gather")[:, : len(part)]
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x[0], memory_format=torch.contiguous_format)
        self._report("reduce_scatter", [out.nbytes] * self.size)
        mine, into = x.reshape(self.size, -1), out.view(-1)
        step = REGION // (self.size * x.element_size())
        for begin in range(0, len(into), step):
            part = mine[:, begin : begin + step].contiguous()
            parts = self._publish(part.view(-1).view(torch.uint8), "reduce_scatter")[:, : part.nbytes]
            addends = parts.view(x.dtype).view(self.size, self.size, -1)[:, self.rank]
            _add(addends, into[begin : begin + step])
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._report("all_reduce", [x.nbytes] * self.size)
        for part in x.view(-1).split(REGION // x.element_size()):
            parts = self._publish(part.view(torch.uint8), "all_reduce")[:, : part.nbytes]
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

    def _publish(self, part: Tensor, operation: str, extents: Sequence[int] | None = None) -> Tensor:
        """Publishes this rank's bytes; returns the bytes of all ranks, [R, S], valid until the turn after the next."""
        self._turn += 1
        turn = self._turn % TURNS
        self._regions[turn, self.rank, : len(part)] = part
        if extents is not None:
            self._extents[turn, self.rank] = extents
        self._segment.raise_flag(0, self._turn)
        self._segment.wait(0, self._turn, f"{operation} through shared memory")
        return self._regions[turn]


def through_shared_memory(inner: DistributedGroup) -> HostGroup | DistributedGroup:
    """The group with shared-memory collectives, or unchanged if its ranks cannot share memory. Collective over CPU
    ranks that are expected to be on one host; all ranks get the same kind of result."""
    reasons = inner.exchange_ints([int(host_support.why_not() is not None)] * inner.size)
    if any(reasons):
        return inner
    try:
        return HostGroup(inner)
    except ConfigError:  # raised by all ranks: different hosts, or too little memory
        return inner


def _add(parts: Tensor, out: Tensor) -> None:
    """out [N] = the sum of parts [R, N]; it may alias one rank's source tensor."""
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)
    else:
        wide = torch.float32 if out.dtype in _NARROW else out.dtype
        out.copy_(parts.sum(0, dtype=wide))
