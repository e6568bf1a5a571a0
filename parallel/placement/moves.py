"""EPLB moves: from one placement to another in small chunks, with every expert present at all times.

Each rank has `chunk_size` spare slots. A chunk copies experts into the spare slots of their new ranks while steps still
use the old table; between two steps the spare slots are then written to their destinations (or swapped with them) and
the layer's table changes. So a step waits for at most one chunk, and every read of a chunk precedes every write. No
rank sends or receives more than `chunk_size` experts per chunk.

Slots of a rank are interchangeable, so an expert that stays on its rank stays in its slot, and a rank's new experts
take the slots of those it drops; the assignment is made here. If the last copy of an expert would be overwritten, its
new rank receives it in the same chunk; if that chain is too long for a chunk, two slots swap experts.

Legend: L layers, P slots, G ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from moe_engine.errors import ConfigError
from moe_engine.parallel.placement.placement import EMPTY, ExpertPlacement


@dataclass(frozen=True)
class Copy:
    """Copy of an expert into a slot. `source` is a slot, or None: no rank holds it, it is read from the checkpoint."""

    expert: int
    source: int | None
    dest: int


@dataclass(frozen=True)
class Chunk:
    """Copies of one layer, applied between two steps.

    Args:
        layer: layer of the moved experts.
        copies: at most `chunk_size` into and out of each rank; read all before writing any.
        table: the layer's physical_to_logical [P] once they are done.
    """

    layer: int
    copies: tuple[Copy, ...]
    table: tuple[int, ...]


def plan_moves(
    old: ExpertPlacement, new: ExpertPlacement, *, chunk_size: int = 1, num_nodes: int = 1
) -> Iterator[Chunk]:
    """The chunks from `old` to `new`, layer by layer, planned lazily.

    After a layer's last chunk each rank holds its experts of `new`, in the order of the chunk's table.
    Layers that do not change have no chunk.

    Args:
        old: the current placement; slots of absent ranks are empty (`ExpertPlacement.without_ranks`).
        new: of the same sizes.
        chunk_size: spare slots of each rank.
        num_nodes: sources on the receiver's node are preferred.

    Raises:
        ConfigError: the placements differ in size, or a number is below 1.
    """
    same = old.physical_to_logical.shape == new.physical_to_logical.shape and old.num_ranks == new.num_ranks
    if not same or chunk_size < 1 or num_nodes < 1 or old.num_ranks % num_nodes:
        raise ConfigError(
            f"cannot move from {old.num_layers} layers x {old.num_physical} slots on {old.num_ranks} ranks to "
            f"{new.num_layers} x {new.num_physical} on {new.num_ranks}, {chunk_size} at a time, {num_nodes} nodes"
        )
    return _all_layers(old, new, chunk_size, old.num_ranks // num_nodes)


def _all_layers(old: ExpertPlacement, new: ExpertPlacement, chunk_size: int, ranks_per_node: int) -> Iterator[Chunk]:
    for layer in range(old.num_layers):
        way = _LayerMoves(
            old.physical_to_logical[layer].tolist(), new.by_rank[layer].tolist(), chunk_size, ranks_per_node
        )
        for copies, table in way.chunks():
            yield Chunk(layer, copies, table)


class _LayerMoves:
    """Move state of one layer: the current table, each rank's missing experts, and its free slots."""

    def __init__(self, table: list[int], wanted: list[list[int]], chunk_size: int, ranks_per_node: int) -> None:
        self._table = table
        self._chunk_size = chunk_size
        self._ranks_per_node = ranks_per_node
        self._per_rank = len(table) // len(wanted)
        self._goal = [Counter(expert for expert in experts if expert != EMPTY) for experts in wanted]
        self._kept = {expert for goal in self._goal for expert in goal}
        self._missing: list[Counter[int]] = []  # by rank: missing experts
        self._free: list[list[int]] = []  # by rank: slots of experts that the rank drops
        for rank in range(len(wanted)):
            self._missing.append(Counter())
            self._free.append([])
            self._settle(rank)
        self._start_chunk()

    def _settle(self, rank: int) -> None:
        """Compares the rank's experts with its target."""
        want = self._goal[rank].copy()
        free = []
        for slot in range(rank * self._per_rank, (rank + 1) * self._per_rank):
            if want[self._table[slot]] > 0:
                want[self._table[slot]] -= 1
            else:
                free.append(slot)
        self._missing[rank], self._free[rank] = +want, free

    def _start_chunk(self) -> None:
        self._copies: list[Copy] = []
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._holders: dict[int, list[int]] = {}  # slots of each expert at the start of the chunk
        for slot, expert in enumerate(self._table):
            if expert != EMPTY:
                self._holders.setdefault(expert, []).append(slot)
        self._left = Counter({expert: len(slots) for expert, slots in self._holders.items()})  # copies at its end

    def chunks(self) -> Iterator[tuple[tuple[Copy, ...], tuple[int, ...]]]:
        while any(self._missing):
            self._start_chunk()
            for rank in range(len(self._missing)):
                while self._received[rank] < self._chunk_size and self._add_first(rank):
                    pass
            if not self._copies:
                self._add_chain(self._trade())
            for copy in self._copies:
                self._table[copy.dest] = copy.expert
            for rank in self._received:
                self._settle(rank)
            yield tuple(self._copies), tuple(self._table)
        leftover = [slot for free in self._free for slot in free if self._table[slot] != EMPTY]
        if leftover:
            for slot in leftover:
                self._table[slot] = EMPTY
            yield (), tuple(self._table)

    def _add_first(self, rank: int) -> bool:
        """Adds the chain of the first missing expert of the rank that fits into the chunk; False if none does."""
        return any(self._add_chain(self._chain(rank, expert)) for expert in list(self._missing[rank]))

    def _add_chain(self, chain: list[Copy]) -> bool:
        """Adds copies to the chunk; False if there are none."""
        for copy in chain:
            rank = copy.dest // self._per_rank
            self._left[self._table[copy.dest]] -= 1
            self._left[copy.expert] += 1
            self._received[rank] += 1
            self._count_sent(self._sent, copy)
            self._free[rank].remove(copy.dest)
            self._missing[rank][copy.expert] -= 1
            self._missing[rank] = +self._missing[rank]
        self._copies += chain
        return bool(chain)

    def _count_sent(self, sent: Counter[int], copy: Copy) -> None:
        if copy.source is not None and copy.source // self._per_rank != copy.dest // self._per_rank:
            sent[copy.source // self._per_rank] += 1

    def _chain(self, rank: int, expert: int) -> list[Copy]:
        """Copies that bring the expert to the rank, and every last copy they overwrite to its target rank.

        Empty if they do not fit into the chunk. The counters hold what the chain adds to those of the chunk.
        """
        chain: list[Copy] = []
        sent, received, left = Counter[int](), Counter[int](), Counter[int]()
        used: set[int] = set()
        while True:
            if self._received[rank] + received[rank] >= self._chunk_size:
                return []
            source, found = self._source(expert, rank, sent)
            if not found:
                return []
            free = [slot for slot in self._free[rank] if slot not in used]
            slot = next((slot for slot in free if self._may_overwrite(self._table[slot], left)), free[0])
            chain.append(Copy(expert, source, slot))
            self._count_sent(sent, chain[-1])
            received[rank] += 1
            used.add(slot)
            victim = self._table[slot]
            displaced = not self._may_overwrite(victim, left)
            left[expert] += 1
            left[victim] -= 1
            if not displaced:
                return chain
            target_ranks = [other for other, want in enumerate(self._missing) if want[victim]]
            rank = next(
                (home for home in target_ranks if self._received[home] + received[home] < self._chunk_size),
                target_ranks[0],
            )
            expert = victim

    def _may_overwrite(self, expert: int, left: Counter[int]) -> bool:
        """True if a slot with this expert may be overwritten: it is empty, not the last copy, or not in the target.
        `left`: change of the number of copies by a chain."""
        return expert == EMPTY or self._left[expert] + left[expert] > 1 or expert not in self._kept

    def _source(self, expert: int, rank: int, sent: Counter[int]) -> tuple[int | None, bool]:
        """The best source slot, and whether there is one: own rank, own node, then the rank that has sent least, with
        those of the chain."""
        if expert not in self._holders:
            return None, True
        node = rank // self._ranks_per_node

        def far(slot: int) -> tuple[bool, bool, int]:
            holder = slot // self._per_rank
            return holder != rank, holder // self._ranks_per_node != node, self._sent[holder] + sent[holder]

        able = [
            slot
            for slot in self._holders[expert]
            if (holder := slot // self._per_rank) == rank or self._sent[holder] + sent[holder] < self._chunk_size
        ]
        return (min(able, key=far), True) if able else (None, False)

    def _trade(self) -> list[Copy]:
        """Swaps the experts of two slots, one of which reaches its target: the fallback if every chain is too long."""
        rank = next(rank for rank, want in enumerate(self._missing) if want)
        slot = self._free[rank][0]
        home = next(other for other, want in enumerate(self._missing) if want[self._table[slot]])
        back = next(
            (other for other in self._free[home] if self._missing[rank][self._table[other]]), self._free[home][0]
        )
        return [Copy(self._table[slot], slot, back), Copy(self._table[back], back, slot)]
