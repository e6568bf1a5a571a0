"""Placements on the surviving ranks: lost experts are listed, and the moves result in the plan."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moe_engine.elastic.placement import plan_for_survivors
from moe_engine.errors import ConfigError
from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.placement.moves import plan_moves
from moe_engine.parallel.placement.placement import EMPTY, ExpertPlacement
from moe_engine.parallel.placement.policies import plan_placement
from tests.distributed.placement.drawn import counts_for, layouts
from tests.distributed.placement.test_placement_moves import arrived, by_rank, follow


@given(st.data())
@settings(max_examples=40)
def test_survivors_hold_what_fits_and_the_rest_is_named(data):
    layout = data.draw(layouts())
    counts = data.draw(counts_for(layout, 2))
    previous = plan_placement(counts, layout)
    alive = np.array(data.draw(st.lists(st.booleans(), min_size=layout.num_ranks, max_size=layout.num_ranks)))
    assume(alive.any())
    found = plan_for_survivors(counts, layout, alive, previous)

    left = previous.without_ranks(alive)
    assert list(found.lost) == left.missing
    assert (found.placement.by_rank[:, ~alive] == EMPTY).all()
    assert list(found.unplaced) == found.placement.missing
    num_slots = layout.slots_per_rank * int(alive.sum())
    for layer in range(2):
        unplaced = [expert for at, expert in found.unplaced if at == layer]
        assert len(unplaced) == max(0, layout.num_experts - num_slots)
        placed = np.delete(counts[layer], unplaced)
        assert not unplaced or counts[layer, unplaced].max() <= placed.min(), "a hot expert was replaced by a cold one"

    kept = (left.num_valid > 0) & (found.placement.num_valid > 0)  # [L, E]
    present = [set(np.flatnonzero(row).tolist()) for row in kept]
    chunks = list(plan_moves(left, found.placement, chunk_size=2))
    slots, _ = follow(left, chunks, 2, present)
    assert arrived(slots, found.placement) == by_rank(found.placement)
    lost = set(found.lost)
    for chunk in chunks:
        assert all((chunk.layer, copy.expert) in lost for copy in chunk.copies if copy.source is None)


def test_a_second_death_and_a_named_loss():
    layout = ExpertLayout(8, 4)
    previous = ExpertPlacement.trivial(layout, 1)
    counts = np.arange(8)[None] + 1
    first = plan_for_survivors(counts, layout, [True, False, True, True], previous)
    assert first.lost == ((0, 2), (0, 3))
    assert first.unplaced == ((0, 0), (0, 1))  # six slots for eight experts: the coldest two are removed
    second = plan_for_survivors(counts, layout, [False, False, True, True], first.placement)
    assert len(second.unplaced) == 4 and {expert for _, expert in second.unplaced} == {0, 1, 2, 3}
    with pytest.raises(ConfigError, match="at least one of 4"):
        plan_for_survivors(counts, layout, [False] * 4, previous)


def test_redundancy_survives_a_death_without_loss():
    """Every expert has two copies, on ranks of different halves: half of the ranks may be lost."""
    layout = ExpertLayout(8, 4, 8)
    previous = ExpertPlacement.trivial(layout, 3)
    counts = np.random.default_rng(2).integers(1, 100, (3, 8))
    found = plan_for_survivors(counts, layout, [True, True, False, True], previous)
    assert not found.lost and not found.unplaced
    assert (found.placement.num_valid >= 1).all()


def test_groups_stay_on_a_node_while_they_fit_the_nodes() -> None:
    """Four groups on four nodes of two ranks: two nodes have two groups each, three nodes no equal shares."""
    rng = np.random.default_rng(random.getrandbits(32))
    layout = ExpertLayout(16, 8, 16, num_nodes=4, num_groups=4)
    counts = rng.integers(1, 100, (2, 16))
    previous = plan_placement(counts, layout, "deepseek_hierarchical")
    order = rng.permutation(4)

    def on(nodes: int) -> ExpertPlacement:
        alive = np.repeat(order < nodes, 2)
        found = plan_for_survivors(counts, layout, alive, previous, "deepseek_hierarchical")
        assert not found.unplaced
        return found.placement.of_ranks(alive)

    assert on(3).num_ranks == 6
    groups = on(2).physical_to_logical.reshape(2, 2, -1) // 4
    assert all(len(set(node)) == 2 for layer in groups.tolist() for node in layer)
