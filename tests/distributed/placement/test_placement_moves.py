"""Moves between placements: applied copy by copy, they never lose an expert, respect the limits and result in the
plan."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.errors import ConfigError
from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.placement.moves import Chunk, Copy, _LayerMoves, plan_moves
from moe_engine.parallel.placement.placement import EMPTY, ExpertPlacement
from moe_engine.parallel.placement.policies import plan_placement
from tests.distributed.placement.drawn import counts_for, layouts

quick = settings(max_examples=40)


def shuffled(layout: ExpertLayout, num_layers: int, generator: np.random.Generator) -> ExpertPlacement:
    """Any complete placement, copies of an expert on one rank included."""
    row = np.arange(layout.num_physical) % layout.num_experts
    table = np.stack([generator.permutation(row) for _ in range(num_layers)])
    return ExpertPlacement(table, layout.num_experts, layout.num_ranks)


def follow(
    old: ExpertPlacement, chunks: list[Chunk], chunk_size: int, always: list[set[int]]
) -> tuple[list[list[int]], int]:
    """Applies chunks to a model of the slots; checks each. Returns the last tables and the number of copies between
    ranks.

    Args:
        always: for each layer the experts that must have a copy after every chunk.
    """
    slots = old.physical_to_logical.tolist()
    per_rank, sent_in_all = old.slots_per_rank, 0
    for chunk in chunks:
        held = list(slots[chunk.layer])
        sent, received = Counter(), Counter()
        for copy in chunk.copies:
            received[copy.dest // per_rank] += 1
            if copy.source is None:
                assert copy.expert not in held, "read from the checkpoint although a rank has it"
            else:
                assert held[copy.source] == copy.expert, "the source does not hold the expert"
                assert copy.source != copy.dest
                sent[copy.source // per_rank] += copy.source // per_rank != copy.dest // per_rank
            slots[chunk.layer][copy.dest] = copy.expert
        assert len({copy.dest for copy in chunk.copies}) == len(chunk.copies)
        assert max([*sent.values(), *received.values(), 0]) <= chunk_size
        sent_in_all += sum(sent.values())
        for slot, expert in enumerate(chunk.table):
            assert expert in (EMPTY, slots[chunk.layer][slot]), "the table names an expert that is not in the slot"
        slots[chunk.layer] = list(chunk.table)
        assert always[chunk.layer] <= set(chunk.table), "an expert has no copy"
    return slots, sent_in_all


def by_rank(placement: ExpertPlacement) -> list[list[list[int]]]:
    return np.sort(placement.by_rank, axis=2).tolist()


def arrived(slots: list[list[int]], like: ExpertPlacement) -> list[list[list[int]]]:
    return by_rank(ExpertPlacement(np.array(slots), like.num_experts, like.num_ranks))


@given(st.data())
@quick
def test_any_way_arrives_and_loses_nothing(data):
    layout = data.draw(layouts())
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    chunk_size = data.draw(st.integers(1, 3))
    old, new = (shuffled(layout, 2, generator) for _ in range(2))
    chunks = list(plan_moves(old, new, chunk_size=chunk_size, num_nodes=layout.num_nodes))
    slots, _ = follow(old, chunks, chunk_size, [set(range(layout.num_experts))] * 2)
    assert arrived(slots, new) == by_rank(new)
    assert not list(plan_moves(new, new))


class CopiedCounters(_LayerMoves):
    """Plans each chain on copies of the chunk's counters, which are then the counters of the chain."""

    def _chain(self, rank: int, expert: int) -> list[Copy]:
        before = self._sent, self._received, self._left
        self._sent, self._received, self._left = (counter.copy() for counter in before)
        try:
            return self._longest(rank, expert)
        finally:
            self._sent, self._received, self._left = before

    def _longest(self, rank: int, expert: int) -> list[Copy]:
        chain: list[Copy] = []
        while True:
            source, found = self._source(expert, rank, Counter())
            if self._received[rank] >= self._chunk_size or not found:
                return []
            free = [slot for slot in self._free[rank] if slot not in {copy.dest for copy in chain}]
            over = [slot for slot in free if self._may_overwrite(self._table[slot], Counter())]
            chain.append(Copy(expert, source, (over or free)[0]))
            self._count_sent(self._sent, chain[-1])
            self._received[rank] += 1
            victim = self._table[chain[-1].dest]
            self._left += Counter({expert: 1})
            self._left[victim] -= 1
            if over:
                return chain
            homes = [other for other, want in enumerate(self._missing) if want[victim]]
            rank = min(homes, key=lambda home: self._received[home] >= self._chunk_size)
            expert = victim


@given(st.data())
@quick
def test_chains_count_as_on_copies_of_the_counters(data):
    layout = data.draw(layouts())
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    old, new = (shuffled(layout, 1, generator) for _ in range(2))
    chunk_size, ranks_per_node = data.draw(st.integers(1, 3)), layout.num_ranks // layout.num_nodes
    plain = CopiedCounters(old.physical_to_logical[0].tolist(), new.by_rank[0].tolist(), chunk_size, ranks_per_node)
    chunks = plan_moves(old, new, chunk_size=chunk_size, num_nodes=layout.num_nodes)
    assert [(chunk.copies, chunk.table) for chunk in chunks] == list(plain.chunks())


@given(st.data())
@quick
def test_plans_are_reached_with_few_copies(data):
    layout = data.draw(layouts())
    old, new = (plan_placement(data.draw(counts_for(layout, 2)), layout) for _ in range(2))
    chunks = list(plan_moves(old, new, chunk_size=4, num_nodes=layout.num_nodes))
    slots, _ = follow(old, chunks, 4, [set(range(layout.num_experts))] * 2)
    assert arrived(slots, new) == by_rank(new)
    needed = 0
    for before, after in zip(old.by_rank.reshape(-1, old.slots_per_rank), new.by_rank.reshape(-1, old.slots_per_rank)):
        needed += sum((Counter(after.tolist()) - Counter(before.tolist())).values())
        stays = set(before.tolist()) & set(after.tolist())
        assert len(stays) + len(set(after.tolist()) - stays) == len(set(after.tolist()))
    copies = sum(len(chunk.copies) for chunk in chunks)
    assert needed <= copies <= needed + needed // 2  # trades need a second copy, and are rare


def test_what_stays_is_not_touched():
    old = ExpertPlacement(np.array([[0, 1, 2, 3, 4, 5]]), 6, 2)
    new = ExpertPlacement(np.array([[2, 5, 1, 4, 3, 0]]), 6, 2)
    (chunk,) = plan_moves(old, new)
    assert {(copy.expert, copy.source, copy.dest) for copy in chunk.copies} == {(0, 0, 5), (5, 5, 0)}
    assert chunk.table == (5, 1, 2, 3, 4, 0)


def test_a_ring_through_all_ranks_is_one_chunk():
    """Every rank sends its only expert to the next rank: no copy is redundant, and one slot per rank suffices."""
    old = ExpertPlacement(np.arange(5)[None], 5, 5)
    new = ExpertPlacement(np.roll(np.arange(5), 1)[None], 5, 5)
    (chunk,) = plan_moves(old, new)
    assert len(chunk.copies) == 5 and chunk.table == (4, 0, 1, 2, 3)


def test_a_chain_longer_than_a_chunk_becomes_trades():
    """The ring visits each rank twice, but a rank receives one expert at a time."""
    old = ExpertPlacement(np.array([[0, 1, 2, 3, 4, 5]]), 6, 3)
    new = ExpertPlacement(np.array([[5, 3, 1, 4, 0, 2]]), 6, 3)
    for chunk_size in (1, 2):
        chunks = list(plan_moves(old, new, chunk_size=chunk_size))
        slots, _ = follow(old, chunks, chunk_size, [set(range(6))])
        assert arrived(slots, new) == by_rank(new)


def test_sources_on_the_same_node_are_preferred():
    old = ExpertPlacement(np.array([[0, 1, 0, 2, 0, 3, 1, 2]]), 4, 4)  # nodes: slots 0-3, 4-7
    new = ExpertPlacement(np.array([[0, 1, 0, 1, 0, 3, 2, 0]]), 4, 4)
    copies = [copy for chunk in plan_moves(old, new, num_nodes=2) for copy in chunk.copies]
    assert {(copy.expert, copy.source, copy.dest) for copy in copies} == {(1, 1, 3), (0, 4, 6)}


def test_sizes_must_agree():
    one, other = ExpertPlacement(np.arange(4)[None], 4, 2), ExpertPlacement(np.arange(4)[None], 4, 4)
    with pytest.raises(ConfigError, match="cannot move"):
        plan_moves(one, other)
    with pytest.raises(ConfigError, match="0 at a time"):
        plan_moves(one, one, chunk_size=0)
