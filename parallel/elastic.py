"""A world that goes on without the ranks it lost: groups that keep their size, with ranks that bring nothing.

Whoever holds a group sees all R ranks for ever. A lost one sends zeros, gets nothing and adds nothing; `alive` says who
is left, for those to whom zeros mean something (dispatchers: id 0 is an expert). Underneath, each loss ends one set of
process groups and begins the next: `give_up` lets go of what is under way in the old one, `form` makes the new.

Legend: R ranks, S of them alive, C columns.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_engine.parallel.collectives import DistributedGroup, Group, Observer, SingleRank
from moe_engine.parallel.expert_transfer import PeerLink


class SurvivorGroup:
    """Implements `Group` for R ranks over a group of those alive. Use as that; `enter` belongs to `ElasticWorld`."""

    def __init__(self, inner: Group) -> None:
        self.size, self.rank = inner.size, inner.rank
        self.timeout_s, self.device = inner.timeout_s, inner.device
        self.alive: Tensor | None = None
        self._inner = inner
        self._places = list(range(inner.size))  # the ranks alive, in order

    def enter(self, inner: Group, alive: Sequence[bool]) -> None:
        """From now on `inner` serves, whose ranks are those alive, in order."""
        self._inner = inner
        self._places = [rank for rank, lives in enumerate(alive) if lives]
        self.alive = torch.tensor(list(alive), device=self.device)

    def all_to_all(
        self, out: Tensor, x: Tensor, out_rows: Sequence[int] | None = None, x_rows: Sequence[int] | None = None
    ) -> None:
        if self.alive is None:
            self._inner.all_to_all(out, x, out_rows, x_rows)
            return
        incoming = self._parts(out, out_rows)
        leaving = self._parts(x, x_rows)
        sent = torch.cat([leaving[rank] for rank in self._places])
        counts = [len(incoming[rank]) for rank in self._places]
        received = out.new_empty(sum(counts), *out.shape[1:])
        self._inner.all_to_all(received, sent, counts, [len(leaving[rank]) for rank in self._places])
        out.zero_()
        for rank, rows in zip(self._places, received.split(counts)):
            incoming[rank].copy_(rows)

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = self._inner.all_gather(x)
        if self.alive is None:
            return gathered
        out = x.new_zeros(self.size, *x.shape)
        out[self._places] = gathered
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        parts = (x if self.alive is None else x[self._places]).contiguous()
        received = torch.empty_like(parts)
        self._inner.all_to_all(received, parts)  # gloo's own operation waits to its end, whatever happens
        return received.sum(0)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._inner.all_reduce(x)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return self._inner.broadcast(x, self._places.index(source))

    def exchange_ints(self, values: Sequence[int]) -> list[int]:
        received = [0] * self.size
        for rank, value in zip(self._places, self._inner.exchange_ints([values[rank] for rank in self._places])):
            received[rank] = value
        return received

    def barrier(self) -> None:
        self._inner.barrier()

    def check(self) -> None:
        self._inner.check()

    def _parts(self, x: Tensor, rows: Sequence[int] | None) -> list[Tensor]:
        """Views of each rank's rows."""
        counts = [len(x) // self.size] * self.size if rows is None else rows
        return [x[begin:end] for begin, end in pairwise(accumulate(counts, initial=0))]


class ElasticWorld:
    """The groups of all ranks of one world, by use, for as long as one of them lives.

    Args:
        size, rank: of the whole world, the lost included.
        timeout_s: after which an operation raises `PeerLost`.
        device: where the tensors live that travel.
        uses: names of the groups. Each has messages of its own.
        observe: as of `DistributedGroup`.
    """

    def __init__(
        self,
        size: int,
        rank: int,
        timeout_s: float,
        device: torch.device | str,
        uses: Sequence[str],
        observe: Observer | None = None,
    ) -> None:
        self.size, self.rank = size, rank
        self.alive = (True,) * size
        self._timeout_s, self._device, self._observe = timeout_s, device, observe
        self._given_up = threading.Event()
        self._kept: list[Any] = []  # process groups given up: their end waits for what hangs in them
        self._made: list[Any] = []
        self.groups = {use: SurvivorGroup(self._make()) for use in uses}

    @property
    def places(self) -> list[int]:
        """The ranks alive, in order."""
        return [rank for rank, lives in enumerate(self.alive) if lives]

    @property
    def given_up(self) -> threading.Event:
        """Set when the groups of now are given up."""
        return self._given_up

    def give_up(self) -> None:
        """What is under way fails with `PeerLost`. From any thread; what `form` makes afterwards is the next set."""
        self._given_up.set()
        self._given_up = threading.Event()

    def form(self, alive: Sequence[bool]) -> None:
        """New groups of the ranks alive. Collective among them, over torch's new default group, which they have joined
        in their order."""
        self._kept += self._made
        self._made, self.alive = [], tuple(alive)
        for group in self.groups.values():
            group.enter(self._make(), alive)

    def link(self) -> PeerLink:
        """Messages between the ranks of now, by their numbers of always. Collective among them."""
        places = self.places
        members = list(range(len(places)))
        return PeerLink(
            [members], places.index(self.rank), self._timeout_s, self._device, places=places, given_up=self._given_up
        )

    def _make(self) -> Group:
        """A process group of all ranks of torch's world."""
        count = dist.get_world_size()
        if count == 1:
            return SingleRank(self._device)
        group = dist.new_group(list(range(count)), timeout=timedelta(seconds=self._timeout_s))
        self._made.append(group)
        return DistributedGroup(group, self._timeout_s, self._device, self._observe, self._given_up)
