"""Process groups that keep their size after the loss of ranks.

Users of a group always see R ranks. A lost rank sends zeros, receives nothing and adds nothing; `alive` lists the live
ranks for users that must not interpret these zeros (dispatchers: id 0 is an expert). Internally each loss ends one set
of process groups and starts the next: `give_up` aborts the old set's pending operations, `form` creates the new set.

Legend: R ranks, S live ranks, C columns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_engine.parallel.collectives import DistributedGroup, Group, Observer, PeerLost, SingleRank
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.expert_transfer import lost_while_moving
from moe_engine.parallel.topology import Topology

POLL_INTERVAL = timedelta(milliseconds=50)
"""Poll interval of an abortable wait."""


def wait_unless(given_up: threading.Event, work: Any, timeout_s: float) -> None:
    """Waits for an operation of torch.distributed, which is abandoned once `given_up` is set: its output buffers must
    then not be used any more.

    Raises:
        RuntimeError: the operation failed, was aborted, or took longer than `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        try:
            work.wait(POLL_INTERVAL)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # re-raises the operation's own error
                return
            if time.monotonic() - began < POLL_INTERVAL.total_seconds():
                raise  # not a timeout
            if given_up.is_set():
                raise RuntimeError("aborted: other ranks were lost") from None
            if time.monotonic() > deadline:
                raise


class AbortableGroup(DistributedGroup):
    """A process group whose pending operations abort when `given_up` is set. A failing operation sets it."""

    def __init__(
        self,
        process_group: Any,
        timeout_s: float,
        device: torch.device | str,
        observe: Observer | None,
        given_up: threading.Event,
    ) -> None:
        super().__init__(process_group, timeout_s, device, observe)
        self._given_up = given_up

    def check(self) -> None:
        if self._given_up.is_set():
            raise PeerLost(f"rank {self.rank} of {self.size} aborts: other ranks were lost")

    def _run(self, operation: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            self.check()
            work = call(*args, group=self._process_group, async_op=True, **kwargs)
            wait_unless(self._given_up, work, self.timeout_s)
        except RuntimeError as error:
            # A step may be queued after this one. A peer still in an operation of this step would take that step's
            # first message for this one's, and gloo would crash it: no later operation may start.
            self._given_up.set()
            raise self._peer_lost(operation, error) from error


class SurvivorGroup:
    """Implements `Group` for R ranks over a group of the live ranks. `enter` is called by `ElasticWorld` only."""

    def __init__(self, inner: Group) -> None:
        self.size, self.rank = inner.size, inner.rank
        self.timeout_s, self.device, self.on_host = inner.timeout_s, inner.device, inner.on_host
        self.alive: Tensor | None = None
        self._inner = inner
        self._places = list(range(inner.size))  # the live ranks, in order
        self._lost: list[int] = []

    def enter(self, inner: Group, alive: Sequence[bool]) -> None:
        """Switches to `inner`, a group of the live ranks, in order."""
        self._inner = inner
        self._places = [rank for rank, lives in enumerate(alive) if lives]
        self._lost = [rank for rank, lives in enumerate(alive) if not lives]
        self.alive = torch.tensor(list(alive), device=self.device)

    def all_to_all(
        self, out: Tensor, x: Tensor, out_rows: Sequence[int] | None = None, x_rows: Sequence[int] | None = None
    ) -> None:
        if self.alive is None:
            self._inner.all_to_all(out, x, out_rows, x_rows)
            return
        if out_rows is not None and x_rows is not None and not any(out_rows[r] or x_rows[r] for r in self._lost):
            places = self._places
            self._inner.all_to_all(out, x, [out_rows[rank] for rank in places], [x_rows[rank] for rank in places])
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
        self._inner.all_to_all(received, parts)  # gloo's reduce_scatter cannot be aborted
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
        """Views of the rows of each rank."""
        counts = [len(x) // self.size] * self.size if rows is None else rows
        return [x[begin:end] for begin, end in pairwise(accumulate(counts, initial=0))]


class SurvivorLink:
    """Implements `expert_transfer.Link` by abortable collectives: gloo closes the connection of a point-to-point
    message whose wait is aborted, even if the message was only slow.

    Args:
        group: torch's process group.
        places: world ranks of its members.
        given_up: when set, messages fail.
    """

    def __init__(
        self, group: Any, places: Sequence[int], timeout_s: float, device: torch.device | str, given_up: threading.Event
    ) -> None:
        self._group, self._places = group, places
        self._timeout_s, self._device, self._given_up = timeout_s, device, given_up

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> list[_Messages]:
        leaving, arriving = self._by_place(sends), self._by_place(receives)
        nothing = torch.empty(0, dtype=torch.uint8, device=self._device)
        sent = torch.cat([nothing, *(part for parts in leaving for part in parts)])
        counts = [sum(map(len, parts)) for parts in arriving]
        received = sent.new_empty(sum(counts))
        try:
            work = dist.all_to_all_single(
                received, sent, counts, [sum(map(len, parts)) for parts in leaving], group=self._group, async_op=True
            )
        except RuntimeError as error:
            raise lost_while_moving(error) from error
        return [_Messages(work, sent, received, [part for parts in arriving for part in parts])]

    def wait(self, works: Sequence[_Messages]) -> None:
        for messages in works:
            try:
                wait_unless(self._given_up, messages.work, self._timeout_s)
            except RuntimeError as error:
                raise lost_while_moving(error) from error
            for part, arrived in zip(messages.parts, messages.received.split([len(part) for part in messages.parts])):
                part.copy_(arrived)

    def _by_place(self, messages: Sequence[tuple[int, Tensor]]) -> list[list[Tensor]]:
        """The bytes of each rank's messages, as views."""
        return [[part.view(-1).view(torch.uint8) for peer, part in messages if peer == place] for place in self._places]


@dataclass(frozen=True)
class _Messages:
    """All messages of this rank in one operation, as bytes; `parts` are the destinations of the received bytes."""

    work: Any
    sent: Tensor
    received: Tensor
    parts: list[Tensor]


class ElasticWorld:
    """The groups of one world's ranks, by use, across losses of ranks.

    Args:
        size, rank: of the original world, lost ranks included.
        timeout_s: timeout after which an operation raises `PeerLost`.
        device: device of the communicated tensors.
        uses: names of the groups. Each is a separate process group.
        observe: see `DistributedGroup`.
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
        self._kept: list[Any] = []  # aborted process groups: destroying them would wait for hanging operations
        self._made: list[Any] = []
        self.groups = {use: SurvivorGroup(self._make()) for use in uses}

    @property
    def places(self) -> list[int]:
        """The live ranks, in order."""
        return [rank for rank, lives in enumerate(self.alive) if lives]

    @property
    def given_up(self) -> threading.Event:
        """Set when the current groups are aborted."""
        return self._given_up

    def give_up(self) -> None:
        """Aborts pending operations with `PeerLost`. Callable from any thread; `form` then creates the next set."""
        self._given_up.set()
        self._given_up = threading.Event()

    def form(self, alive: Sequence[bool]) -> None:
        """Creates new groups of the live ranks. Collective among them, over torch's new default group, which they have
        joined in rank order."""
        self._kept += self._made
        self._made, self.alive = [], tuple(alive)
        for group in self.groups.values():
            group.enter(self._make(), alive)

    def link(self) -> SurvivorLink:
        """Messages between the live ranks, addressed by original rank. Collective among them."""
        return SurvivorLink(self._new_group(), self.places, self._timeout_s, self._device, self._given_up)

    def _new_group(self) -> Any:
        """torch's process group of all ranks of the current world."""
        all_ranks = list(range(dist.get_world_size()))
        group = dist.new_group(all_ranks, timeout=timedelta(seconds=self._timeout_s))
        self._made.append(group)
        return group

    def _make(self) -> Group:
        if dist.get_world_size() == 1:
            return SingleRank(self._device)
        group = self._new_group()
        return AbortableGroup(group, self._timeout_s, self._device, self._observe, self._given_up)


@dataclass(frozen=True)
class ElasticContext(ParallelContext):
    """Each rank has its own requests and whole layers, so that ranks communicate only in dispatch and combine."""

    elastic: ElasticWorld = field(kw_only=True)
    """Owns the groups."""

    def expert_link(self) -> SurvivorLink:
        return self.elastic.link()


def join(
    topology: Topology, rank: int, timeout_s: float, device: torch.device | str, observe: Observer | None = None
) -> ElasticContext:
    """As `parallel.context.join`, for ranks that may be lost."""
    elastic = ElasticWorld(topology.tp_size, rank, timeout_s, device, ("world", "experts"), observe)
    groups = elastic.groups
    return ElasticContext(topology, rank, world=groups["world"], ep=groups["experts"], elastic=elastic)
