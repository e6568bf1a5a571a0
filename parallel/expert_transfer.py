"""Expert transfer between slots during steps: first into spare memory, then into place between two steps.

A *transfer* is one chunk of `placement.moves`: each rank sends and receives at most as many experts as it has spare
slots. `begin` starts all copies in a comm stream and returns; it writes nothing that a step reads. `finish` waits for
pending copies and writes the spare slots to their destinations. All ranks call both between the same two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe_engine.kernels.experts.batch import ExpertWeights
from moe_engine.kernels.experts.protocol import ExpertsKernel
from moe_engine.parallel.collectives import PeerLost
from moe_engine.parallel.overlap import CommStream, InlineStream, Pending
from moe_engine.parallel.placement.moves import Chunk
from moe_engine.parallel.topology import RankLists

INLINE = InlineStream()
Kind = tuple[tuple[torch.Size, torch.dtype], ...]


def kind_of(parts: Sequence[Tensor]) -> Kind:
    """Experts of one kind have the same memory layout."""
    return tuple((part.shape, part.dtype) for part in parts)


class SlotMemory:
    """The memory of this rank's experts, by layer and slot, and spare memory of the same shapes.

    Args:
        weights: of every layer with movable experts.
        num_spare: max experts in transfer at once.
    """

    def __init__(self, kernel: ExpertsKernel, weights: Mapping[int, ExpertWeights], num_spare: int) -> None:
        self._kernel = kernel
        self._weights = weights
        self._spare: dict[Kind, list[list[Tensor]]] = {}
        for of_layer in weights.values():  # all the same, unless a checkpoint stores its MTP layers differently
            like = self._memory(of_layer, 0)
            if kind_of(like) not in self._spare:
                self._spare[kind_of(like)] = [[torch.empty_like(part) for part in like] for _ in range(num_spare)]
        self.num_bytes = sum(part.nbytes for spares in self._spare.values() for spare in spares for part in spare)

    def slot(self, layer: int, slot: int) -> Sequence[Tensor]:
        return self._memory(self._weights[layer], slot)

    def _memory(self, weights: ExpertWeights, slot: int) -> Sequence[Tensor]:
        biases = () if weights.bias is None else (part[slot] for part in weights.bias.memory)
        return [*self._kernel.expert_memory(weights, slot), *biases]

    def take_spare(self, layer: int) -> list[Tensor]:
        """Spare memory for an expert of the layer."""
        return self._spare[kind_of(self.slot(layer, 0))].pop()

    def release(self, spare: list[Tensor]) -> None:
        self._spare[kind_of(spare)].append(spare)


class Work(Protocol):
    def wait(self) -> object: ...


class Link(Protocol):
    """Messages between ranks, separate from the collectives of the steps. Raises `PeerLost`."""

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Sequence[Any]:
        """Starts messages to and from ranks of the group; both ends list their common messages in the same order. All
        ranks make the call, ranks without messages too. Returns the argument of `wait`."""

    def wait(self, works: Sequence[Any]) -> None:
        """Waits until messages have arrived and send buffers may be overwritten."""


class PeerLink:
    """Implements `Link` by point-to-point messages. The constructor is collective.

    Args:
        groups: all groups of this type; this rank's group is used.
        timeout_s: timeout after which a message raises `PeerLost`.
        device: device of the communicated tensors.
    """

    def __init__(self, groups: RankLists, rank: int, timeout_s: float, device: torch.device | str) -> None:
        made = [dist.new_group(ranks, timeout=timedelta(seconds=timeout_s)) for ranks in groups]
        self._group, members = next(found for found in zip(made, groups) if rank in found[1])
        self._connect(len(members), members.index(rank), device)

    def _connect(self, size: int, own: int, device: torch.device | str) -> None:
        """Exchanges a byte with each other rank: connections are opened by the first message, and no step should wait
        for that."""
        peers = [peer for peer in range(size) if peer != own]
        sent, received = torch.zeros(2, size, dtype=torch.uint8, device=device).unbind(0)
        works = self.start(
            [(peer, sent[at : at + 1]) for at, peer in enumerate(peers)],
            [(peer, received[at : at + 1]) for at, peer in enumerate(peers)],
        )
        self.wait(works)

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Sequence[Work]:
        sending = [dist.P2POp(dist.isend, part, group=self._group, group_peer=peer) for peer, part in sends]
        receiving = [dist.P2POp(dist.irecv, part, group=self._group, group_peer=peer) for peer, part in receives]
        try:
            return dist.batch_isend_irecv(sending + receiving) if sending or receiving else ()
        except RuntimeError as error:
            raise lost_while_moving(error) from error

    def wait(self, works: Sequence[Work]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise lost_while_moving(error) from error


def lost_while_moving(error: RuntimeError) -> PeerLost:
    """The `PeerLost` for torch's error."""
    return PeerLost(f"moving experts between ranks failed: {str(error).strip().splitlines()[0]}")


@dataclass(frozen=True)
class _Arrival:
    layer: int
    slot: int
    spare: list[Tensor]


class ExpertTransfer:
    """Moves experts between the slots of G ranks.

    Args:
        memory: this rank's expert memory.
        link: of the G ranks, in the order of their experts.
        rank: this rank's index among them.
        slots_per_rank: P / G.
        stream: comm stream of messages and copies into spare memory, concurrent with steps.
    """

    def __init__(
        self, memory: SlotMemory, link: Link, rank: int, slots_per_rank: int, stream: CommStream = INLINE
    ) -> None:
        self.stream = stream
        self.way_seconds = 0.0
        """Seconds until the last chunk arrived, measured on the host."""
        self._memory = memory
        self._link = link
        self._rank = rank
        self._per_rank = slots_per_rank
        self._under_way: Pending[list[Any]] | None = None
        self._arrivals: list[_Arrival] = []

    def begin(self, chunks: Sequence[Chunk], prepare: Callable[[Chunk], Any] | None = None) -> int:
        """Starts the copies of chunks of different layers. Returns the number of experts received from other ranks.

        `prepare` also runs in the comm stream, for each chunk: `finish` returns its results.
        """
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        own: list[tuple[Sequence[Tensor], list[Tensor]]] = []
        received = 0
        for chunk in chunks:
            for copy in chunk.copies:
                assert copy.source is not None
                (sender, from_slot), (receiver, to_slot) = (divmod(s, self._per_rank) for s in (copy.source, copy.dest))
                if receiver == self._rank:
                    spare = self._memory.take_spare(chunk.layer)
                    self._arrivals.append(_Arrival(chunk.layer, to_slot, spare))
                    if sender == self._rank:
                        own.append((self._memory.slot(chunk.layer, from_slot), spare))
                        continue
                    receives += [(sender, part) for part in spare]
                    received += 1
                elif sender == self._rank:
                    sends += [(receiver, part) for part in self._memory.slot(chunk.layer, from_slot)]
        self._under_way = self.stream.run(self._carry, sends, receives, own, chunks if prepare else (), prepare)
        return received

    def _carry(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        own: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]],
        chunks: Sequence[Chunk],
        prepare: Any,
    ) -> list[Any]:
        began = time.perf_counter()
        works = self._link.start(sends, receives)
        for slot, spare in own:
            _copy(slot, spare)
        prepared = [prepare(chunk) for chunk in chunks]
        self._link.wait(works)
        self.way_seconds = time.perf_counter() - began
        return prepared

    def give_up(self) -> None:
        """Drops the transfer: waits until its messages have failed or arrived."""
        with suppress(PeerLost):
            if self._under_way is not None:
                self._under_way.wait()
        self._under_way = None

    def finish(self) -> list[Any]:
        """Waits for all messages, sent ones included, since their slots are about to be overwritten; then writes.

        Returns the results of `begin`'s `prepare`, per chunk.
        """
        prepared = [] if self._under_way is None else self._under_way.wait()
        self._under_way = None
        for arrival in self._arrivals:
            _copy(arrival.spare, self._memory.slot(arrival.layer, arrival.slot))
            self._memory.release(arrival.spare)
        self._arrivals = []
        return prepared


def _copy(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    for part, into in zip(source, target):
        into.copy_(part)
