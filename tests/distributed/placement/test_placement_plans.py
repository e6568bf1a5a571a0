"""Plans: complete, within capacity, copies on different ranks, not worse than trivial, near the optimum of brute
force."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.errors import ConfigError
from moe_engine.parallel.placement.balance import balancedness, layer_balancedness, rank_loads
from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.placement.packing import exchange
from moe_engine.parallel.placement.placement import ExpertPlacement
from moe_engine.parallel.placement.policies import plan_placement, resolve_policy
from tests.distributed.placement.drawn import counts_for, layouts

quick = settings(max_examples=40)


def moved(old: ExpertPlacement, new: ExpertPlacement) -> int:
    """Experts that are new on a rank."""
    ranks = itertools.product(range(old.num_layers), range(old.num_ranks))
    return sum(len(set(new.by_rank[at].tolist()) - set(old.by_rank[at].tolist())) for at in ranks)


@given(st.data())
@quick
def test_plans_hold_every_expert_and_keep_copies_apart(data):
    layout = data.draw(layouts())
    counts = data.draw(counts_for(layout))
    fits = layout.num_groups % layout.num_nodes == 0
    policy = data.draw(st.sampled_from(("auto", "deepseek", *(("deepseek_hierarchical",) if fits else ()))))
    plan = plan_placement(counts, layout, policy)
    assert plan.physical_to_logical.shape == (len(counts), layout.num_physical)
    assert not plan.missing
    assert (plan.num_valid.sum(axis=1) == layout.num_physical).all()
    hierarchical = resolve_policy(policy, layout) == "deepseek_hierarchical"
    different = layout.num_experts // (layout.num_nodes if hierarchical else 1)  # experts a rank may choose from
    for layer, rank in itertools.product(range(plan.num_layers), range(plan.num_ranks)):
        held = plan.by_rank[layer, rank].tolist()
        assert len(held) == layout.slots_per_rank
        assert len(set(held)) == min(len(held), different), "two copies on one rank"


@given(st.data())
@quick
def test_plans_conserve_tokens_and_beat_trivial(data):
    layout = data.draw(layouts())
    counts = data.draw(counts_for(layout))
    trivial, plan = ExpertPlacement.trivial(layout, len(counts)), plan_placement(counts, layout, "deepseek")
    for placement in (trivial, plan):
        assert rank_loads(placement, counts).sum(axis=1) == pytest.approx(counts.sum(axis=1))
    even = layer_balancedness(rank_loads(plan, counts))
    assert (even >= layer_balancedness(rank_loads(trivial, counts)) - 1e-9).all()
    assert (even <= 1 + 1e-9).all()


def test_layers_that_gain_nothing_stay_trivial():
    """Dense layers and balanced layers have no moves."""
    layout = ExpertLayout(16, 4, 4)
    counts = np.random.default_rng(1).lognormal(3, 1, (3, 16))
    counts[0] = 0
    trivial = ExpertPlacement.trivial(layout, 3).physical_to_logical
    assert (plan_placement(counts, layout).physical_to_logical[0] == trivial[0]).all()
    assert (plan_placement(counts, layout).physical_to_logical[1:] != trivial[1:]).any(axis=1).all()
    even = plan_placement(np.full((3, 16), 5), ExpertLayout(16, 4)).physical_to_logical
    assert (even == np.arange(16)).all()


def test_exchanges_keep_copies_apart():
    generator = np.random.default_rng(2)
    owners = np.stack([np.concatenate([generator.permutation(8) for _ in range(6)]) for _ in range(40)])  # 6 packs of 8
    weights = generator.random((40, 8)) ** 3
    by_item = np.take_along_axis(weights, owners, axis=1) * generator.uniform(0.8, 1.2, owners.shape)
    before = np.tile(np.arange(48), (40, 1))
    after = exchange(before, by_item, owners, 6)
    heaviest = [np.take_along_axis(by_item, items, 1).reshape(40, 6, 8).sum(2).max(1) for items in (before, after)]
    assert (np.sort(after, axis=1) == before).all() and (heaviest[1] <= heaviest[0] + 1e-9).all()
    packs = np.take_along_axis(owners, after, axis=1).reshape(40, 6, 8)
    assert all(len(set(pack.tolist())) == 8 for packs_of in packs for pack in packs_of)


@given(st.data())
@quick
def test_hierarchical_plans_keep_groups_on_a_node(data):
    layout = data.draw(layouts().filter(lambda layout: layout.num_groups % layout.num_nodes == 0))
    counts = data.draw(counts_for(layout))
    plan = plan_placement(counts, layout, "deepseek_hierarchical")
    by_node = plan.physical_to_logical.reshape(len(counts), layout.num_nodes, -1)
    group_of = by_node // (layout.num_experts // layout.num_groups)
    for groups in group_of:
        found = [set(node.tolist()) for node in groups]
        assert [len(node) for node in found] == [layout.num_groups // layout.num_nodes] * layout.num_nodes
        assert set.union(*found) == set(range(layout.num_groups))


@given(st.data())
@quick
def test_near_plans_move_less_and_are_as_even(data):
    layout = data.draw(layouts())
    counts = data.draw(counts_for(layout, num_layers=2))
    previous = plan_placement(counts, layout)
    later = data.draw(counts_for(layout, num_layers=2))
    fresh, near = plan_placement(later, layout), plan_placement(later, layout, previous=previous)
    assert not near.missing
    assert balancedness(near, later) >= balancedness(fresh, later) - 1e-6
    again = plan_placement(counts, layout, previous=previous)
    assert balancedness(again, counts) >= balancedness(previous, counts) - 1e-9
    gain = 0.05
    lazy = plan_placement(later, layout, previous=previous, min_gain=gain)
    lost = layer_balancedness(rank_loads(fresh, later)) - layer_balancedness(rank_loads(lazy, later))
    assert (lost <= 2 * gain + 1e-6).all()


def test_near_plans_move_a_fraction_after_a_small_drift():
    generator = np.random.default_rng(5)
    layout = ExpertLayout(64, 8, 8)
    counts = generator.lognormal(4, 1, (6, 64))
    previous = plan_placement(counts, layout)
    later = counts * generator.lognormal(0, 0.1, counts.shape)
    fresh = moved(previous, plan_placement(later, layout))
    near = moved(previous, plan_placement(later, layout, previous=previous, min_gain=0.02))
    assert 0 < near < fresh / 3


@lru_cache
def dealings(num_ranks: int, size: int) -> list[np.ndarray]:
    """Every assignment of `num_ranks * size` slots to ranks, as rank of each slot, up to permutation of the ranks."""

    def deal(left: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
        if not left:
            yield []
            return
        for mates in itertools.combinations(left[1:], size - 1):
            pack = (left[0], *mates)
            for rest in deal(tuple(slot for slot in left if slot not in pack)):
                yield [pack, *rest]

    found = []
    for packs in deal(tuple(range(num_ranks * size))):
        rank_of = np.empty(num_ranks * size, dtype=np.int64)
        for rank, pack in enumerate(packs):
            rank_of[list(pack)] = rank
        found.append(rank_of)
    return found


def optimum(counts: np.ndarray, layout: ExpertLayout) -> float:
    """The minimum load of the busiest rank, over all numbers of copies and all assignments."""
    spare = layout.num_physical - layout.num_experts
    ranks = np.eye(layout.num_ranks)
    one_hot = np.stack([ranks[rank_of] for rank_of in dealings(layout.num_ranks, layout.slots_per_rank)])
    best = np.inf
    for added in itertools.combinations_with_replacement(range(layout.num_experts), spare):
        slots = np.array([*range(layout.num_experts), *added])
        share = counts / np.bincount(slots, minlength=layout.num_experts)
        best = min(best, float(np.einsum("m,dmg->dg", share[slots], one_hot).max(axis=1).min()))
    return best


SMALL = [ExpertLayout(8, 2), ExpertLayout(9, 3), ExpertLayout(6, 2, 2), ExpertLayout(4, 4, 4), ExpertLayout(7, 3, 2)]


@pytest.mark.parametrize("layout", SMALL)
def test_plans_are_near_the_optimum(layout):
    generator = np.random.default_rng([7, layout.num_experts, layout.num_ranks])
    ratios = []
    for spread in (0.3, 0.3, 0.8, 0.8, 1.5, 1.5, 0.5, 1.0):
        counts = np.ceil(generator.lognormal(4, spread, layout.num_experts))
        heaviest = rank_loads(plan_placement(counts[None], layout), counts[None]).max()
        ratios.append(heaviest / optimum(counts, layout))
    assert min(ratios) >= 1 - 1e-9
    assert np.mean(ratios) < 1.1 and max(ratios) < 1.25, ratios


def test_more_redundancy_is_never_much_worse():
    counts = np.random.default_rng(3).lognormal(3, 1.5, (4, 32))
    even = [balancedness(plan_placement(counts, ExpertLayout(32, 8, spare)), counts) for spare in (0, 8, 16, 32)]
    assert even == sorted(even) and even[-1] > even[0] + 0.1


def test_balancedness_by_hand():
    layout = ExpertLayout(4, 2)
    trivial = ExpertPlacement.trivial(layout, 2)
    counts = np.array([[30, 10, 10, 10], [0, 0, 0, 0]])
    assert rank_loads(trivial, counts).tolist() == [[40, 20], [0, 0]]
    assert balancedness(trivial, counts) == pytest.approx((30 / 40 + 1) / 2, abs=1e-6)
    assert balancedness(trivial, np.stack([counts, counts[:, ::-1]])) == pytest.approx((30 / 40 + 1) / 2, abs=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExpertLayout(256, 32, 5), "27 are valid|32 are valid"),
        (lambda: ExpertLayout(256, 32, 0, 5), "not a multiple of the 5 nodes"),
        (lambda: ExpertLayout(256, 32, 0, 1, 7), "7 equal groups"),
        (lambda: resolve_policy("best", ExpertLayout(8)), "--eplb-algorithm best: unknown; there are auto"),
        (lambda: resolve_policy("deepseek_hierarchical", ExpertLayout(12, 4, 0, 2, 3)), "use deepseek"),
        (lambda: plan_placement(np.ones((2, 7)), ExpertLayout(8)), r"shape \[2, 7\]"),
        (lambda: plan_placement(-np.ones((2, 8)), ExpertLayout(8)), "negative"),
        (lambda: ExpertPlacement(np.array([[0, 8]]), 8), "holds expert 8"),
        (lambda: ExpertPlacement(np.array([[0, 1, 2]]), 3, 2), "not a multiple of --ep-size 2"),
    ],
)
def test_refusals_name_the_flag(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
