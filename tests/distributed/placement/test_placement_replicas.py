"""Logical ids to slots: the slot contains the expert, near copies are preferred, and copies share the tokens."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.errors import ConfigError
from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.placement.moves import plan_moves
from moe_engine.parallel.placement.placement import ExpertPlacement
from moe_engine.parallel.placement.policies import plan_placement
from moe_engine.parallel.placement.replicas import ReplicaChoice, static_choice
from tests.distributed.placement.drawn import counts_for, layouts

quick = settings(max_examples=40)


def near_copies(row: np.ndarray, expert: int, rank: int, layout: ExpertLayout) -> list[int]:
    """The candidate slots of an expert for a rank: on the rank, else on its node, else all."""
    copies = np.flatnonzero(row == expert)
    holders = copies // (layout.num_physical // layout.num_ranks)
    own, near = copies[holders == rank], copies[holders // layout.ranks_per_node == rank // layout.ranks_per_node]
    return (own if len(own) else near if len(near) else copies).tolist()


@given(st.data())
@quick
def test_tables_of_a_placement_agree(data):
    layout = data.draw(layouts())
    plan = plan_placement(data.draw(counts_for(layout)), layout)
    slots = plan.logical_to_all_physical
    for layer, row in enumerate(plan.physical_to_logical.tolist()):
        for expert in range(layout.num_experts):
            own = [slot for slot, held in enumerate(row) if held == expert]
            assert slots[layer, expert].tolist() == own + [-1] * (slots.shape[2] - len(own))
            assert plan.num_valid[layer, expert] == len(own)


@given(st.data())
@quick
def test_static_choice_is_near_fair_and_repeatable(data):
    layout = data.draw(layouts())
    plan = plan_placement(data.draw(counts_for(layout)), layout)
    chosen = static_choice(plan, num_nodes=layout.num_nodes)
    assert (chosen == static_choice(plan, num_nodes=layout.num_nodes)).all()
    for layer, row in enumerate(plan.physical_to_logical):
        assert (row[chosen[layer]] == np.arange(layout.num_experts)).all()
        for expert in range(layout.num_experts):
            used: dict[tuple[int, ...], Counter[int]] = {}  # by the candidate copies of a rank
            for rank in range(layout.num_ranks):
                able = tuple(near_copies(row, expert, rank, layout))
                used.setdefault(able, Counter(dict.fromkeys(able, 0)))[int(chosen[layer, rank, expert])] += 1
            for able, uses in used.items():
                assert set(uses) == set(able) and max(uses.values()) - min(uses.values()) <= 1
    alone = ExpertPlacement(plan.physical_to_logical[-1:], plan.num_experts, plan.num_ranks)
    assert (static_choice(alone, num_nodes=layout.num_nodes, first_layer=plan.num_layers - 1)[0] == chosen[-1]).all()


@given(st.data())
@quick
def test_the_first_choice_moves_on_from_layer_to_layer_and_from_expert_to_expert(data):
    """Otherwise the first copy of each expert would get more than its share if ranks and copies do not divide
    evenly."""
    layout = data.draw(layouts())
    row = plan_placement(data.draw(counts_for(layout, 1)), layout).physical_to_logical[0]
    num_layers = max(Counter(row.tolist()).values())
    same = ExpertPlacement(np.tile(row, (num_layers, 1)), layout.num_experts, layout.num_ranks)
    chosen = static_choice(same, num_nodes=layout.num_nodes)  # [L, G, E]
    for expert in range(layout.num_experts):
        for rank in range(layout.num_ranks):
            able = near_copies(row, expert, rank, layout)
            taken = [able.index(slot) for slot in chosen[:, rank, expert].tolist()]
            assert taken == [(taken[0] + layer) % len(able) for layer in range(num_layers)], (expert, rank)

    twins = np.repeat(np.arange(layout.num_experts), 2)  # both copies of an expert on one rank are equivalent
    both = ExpertPlacement(twins[None], layout.num_experts, 1)
    assert (static_choice(both)[0, 0] == 2 * np.arange(layout.num_experts) + np.arange(layout.num_experts) % 2).all()


@pytest.mark.parametrize("algorithm", ["static", "dynamic"])
def test_ids_become_slots_that_hold_the_expert(algorithm):
    generator = torch.Generator().manual_seed(11)
    counts = np.random.default_rng(4).lognormal(3, 1.5, (3, 12))
    layout = ExpertLayout(12, 4, 8)
    plan = plan_placement(counts, layout)
    choices = [ReplicaChoice(plan, rank, algorithm, num_nodes=2) for rank in range(4)]
    ids = torch.randint(0, 12, (50, 3), generator=generator, dtype=torch.int32)
    ids[7], ids[9, 2] = -1, -1
    for layer in range(3):
        table = torch.from_numpy(plan.physical_to_logical[layer].copy())
        for choice in choices:
            slots = choice.to_physical(layer, ids)
            assert slots.shape == ids.shape and slots.dtype == torch.int32
            assert torch.equal(torch.where(slots < 0, slots, table[slots.long().clamp_min(0)]), ids)
    if algorithm == "dynamic":
        hot = int(plan.num_valid[0].argmax())
        rows = torch.full((60, 1), hot, dtype=torch.int32)
        spread = Counter(choices[0].to_physical(0, rows).flatten().tolist())
        assert set(spread.values()) == {60 // int(plan.num_valid[0, hot])}
        assert torch.equal(choices[0].to_physical(0, ids), choices[3].to_physical(0, ids))


@pytest.mark.parametrize("algorithm", ["static", "dynamic"])
def test_tables_follow_the_moves_in_place(algorithm):
    """After each chunk a choice equals a new choice for that table; its tensors stay at their addresses."""
    layout, generator = ExpertLayout(10, 5, 5), np.random.default_rng(8)
    old, new = (plan_placement(generator.lognormal(3, 1, (2, 10)), layout) for _ in range(2))
    choice = ReplicaChoice(old, 1, algorithm)
    where = choice._slots.data_ptr()
    tables = old.physical_to_logical.copy()
    ids = torch.arange(10, dtype=torch.int32).repeat(6, 1)
    for chunk in plan_moves(old, new):
        choice.update_layer(choice.prepare(chunk.layer, chunk.table))
        tables[chunk.layer] = chunk.table
        expected = ReplicaChoice(ExpertPlacement(tables, 10, 5), 1, algorithm)
        for layer in range(2):
            assert torch.equal(choice.to_physical(layer, ids), expected.to_physical(layer, ids))
    assert choice._slots.data_ptr() == where
    with pytest.raises(ConfigError, match="--ep-dispatch-algorithm random: unknown"):
        ReplicaChoice(old, 0, "random")
