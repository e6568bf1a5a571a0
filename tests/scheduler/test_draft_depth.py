"""Adaptive draft depth: it finds the best depth, disables drafting in time, and costs at most 2 % without noise."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_engine.scheduler.draft_depth import Acceptance, AutoDepth, FixedDepth, make_policy
from moe_engine.scheduler.step_cost_model import StepCost
from moe_engine.types import SpeculationConfig
from tests.examples import examples
from tests.scheduler.depth_simulator import DepthSimulation, Machine, NoDrafts

AUTO = SpeculationConfig("nextn", 4, auto_depth=True)
HOPELESS = (0.0, 0.0, 0.0, 0.0)
GOOD = (0.9, 0.9, 0.9, 0.9)


def simulate(machine: Machine, seed: int = 0) -> DepthSimulation:
    return DepthSimulation(AutoDepth(AUTO), machine, random.Random(seed))


def gain(found: DepthSimulation, num_requests: int) -> float:
    """Throughput relative to the same machine without speculation."""
    plain = DepthSimulation(NoDrafts(), found.machine, random.Random(1))
    return found.speed / plain.run(800, num_requests).speed


def test_a_fixed_number_of_steps() -> None:
    policy = make_policy(SpeculationConfig("ngram", 3))
    assert isinstance(policy, FixedDepth) and policy.enabled
    policy.observe([(3, 0, 0)] * 4, StepCost(4, 4, 3, 99.0, 1.0, 0.0))
    assert policy.choose(4, 4) == policy.choose(1, 0) == 3
    assert isinstance(make_policy(AUTO), AutoDepth)


@pytest.mark.parametrize("num_requests", [1, 5, 64])
def test_hopeless_drafts_disable_drafting_soon(num_requests: int) -> None:
    found = simulate(Machine(rates=HOPELESS)).run(50, num_requests)
    assert not found.enabled[-1] and found.depths[-1] == 0
    assert sum(found.depths) < 50


@pytest.mark.parametrize("num_requests", [1, 8])
def test_good_cheap_drafts_use_the_max_depth(num_requests: int) -> None:
    found = simulate(Machine(rates=GOOD, token=0.001, draft=0.1)).run(400, num_requests)
    assert median(found.depths[100:]) == 4 and all(found.enabled)
    assert gain(found, num_requests) > 3


@pytest.mark.parametrize(("overhead", "pays"), [(1.0, True), (12.0, False)])
def test_host_overhead_is_part_of_the_cost(overhead: float, pays: bool) -> None:
    """A speculative step without drafts costs more than a plain one; only a plain step measures the difference."""
    machine = Machine(rates=(0.9, 0.2, 0.2, 0.2), token=0.1, draft=0.3, overhead=overhead, host_overhead=1.0, length=60)
    assert (machine.best_depth(2) > 0) == pays
    found = simulate(machine).run(400, 2)
    found.change().run(2000, 2)
    assert (median(found.depths) > 0) == pays
    assert gain(found, 2) > (1.2 if pays else 0.98)


def test_a_larger_batch_is_tried_before_drafting_is_disabled() -> None:
    """Many short requests cost more than one request of the same tokens: interpolation wrongly predicts a loss."""

    class Diverse(Machine):
        def seconds(self, num_requests: int, num_drafts: int, depth: int) -> float:
            steps = self.base + 2.0 * num_requests**0.5 + 0.05 * num_drafts
            return steps + self.draft_seconds(num_drafts, depth)

    machine = Diverse(base=4.0, rates=GOOD, draft=0.1, noise=0.0, length=100)
    found = simulate(machine).run(600, 1)
    found.change().run(400, 8)
    assert median(found.depths[100:]) >= 3 and gain(found, 8) > 1.5


@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize(("outliers", "first"), [(0.01, False), (0.0, True), (0.01, True)])
def test_slow_steps_do_not_mislead(num_requests: int, outliers: float, first: bool) -> None:
    """Some steps, or the first of each shape, take 20 times as long, as if a kernel was compiled."""
    machine = Machine(rates=(0.8,) * 4, token=0.05, noise=0.1, outliers=outliers, first=first)
    found = simulate(machine).run(200, num_requests).change(outliers=0.0, first=False).run(2000, num_requests)
    assert found.speed > 0.9 * machine.tokens_per_second(num_requests, machine.best_depth(num_requests))


def test_drafts_with_low_acceptance_at_depth_stay_short() -> None:
    found = simulate(Machine(rates=(0.9, 0.1, 0.1, 0.1), draft=2.0)).run(600, 4)
    assert median(found.depths[200:]) == 1


def test_a_full_batch_disables_drafting_and_a_small_one_enables_it() -> None:
    machine = Machine(base=10.0, token=0.5, draft=0.2, rates=(0.7, 0.7, 0.7, 0.7))
    assert machine.best_depth(64) == 0 and machine.best_depth(1) >= 3
    found = simulate(machine).run(400, 64)
    assert median(found.depths[50:]) == 0 and not found.enabled[-1]
    found.change().run(300, 2)
    assert median(found.depths[-200:]) >= 2, "drafting stayed disabled although drafts now gain"
    found.change().run(400, 64)
    assert median(found.depths[50:]) == 0


@pytest.mark.parametrize(
    ("before", "after", "deeper"),
    [
        ({"token": 0.01}, {"token": 4.0}, False),  # the step is now compute-bound
        ({"draft": 0.1}, {"draft": 8.0}, False),
        ({"rates": GOOD}, {"rates": HOPELESS}, False),
        ({"rates": (0.9, 0.05, 0.05, 0.05)}, {"rates": GOOD}, True),
    ],
    ids=["slower tokens", "slower drafts", "worse drafts", "better drafts"],
)
def test_changed_costs_and_acceptance_are_detected(before: dict[str, Any], after: dict[str, Any], deeper: bool) -> None:
    found = simulate(Machine(**{"rates": GOOD, "draft": 0.3} | before)).run(600, 8)
    usual = median(found.depths[-200:])
    found.change(**after).run(600, 8)
    now, best = median(found.depths[-100:]), found.machine.best_depth(8)
    assert now > usual if deeper else now < usual
    assert abs(now - best) <= 1


def test_drafting_is_retried_with_growing_backoff() -> None:
    found = simulate(Machine(rates=HOPELESS)).run(33_000, 4)
    retries = [i for i in range(1, len(found.enabled)) if found.enabled[i] and not found.enabled[i - 1]]
    assert 3 <= len(retries) <= 7
    gaps = [b - a for a, b in pairwise(retries)]
    assert max(gaps) >= 2 * gaps[0] and sum(found.enabled) < 0.01 * len(found.enabled)
    found.change(rates=GOOD).run(20_000, 4)
    assert median(found.depths[-500:]) == 4, "better drafts were never detected"


def test_expected_tokens_follow_the_shares_accepted() -> None:
    acceptance, rng = Acceptance(3), random.Random(2)
    rates = (0.8, 0.5, 0.25)
    for _ in range(600):
        draft_outcomes = []
        for _ in range(8):
            good = 0
            while good < 3 and rng.random() < rates[good]:
                good += 1
            draft_outcomes.append((3, good, good))
        acceptance.add(draft_outcomes)
    chances = (0.8, 0.8 * 0.5, 0.8 * 0.5 * 0.25)
    for depth in range(4):
        assert acceptance.expected(depth) == pytest.approx(1 + sum(chances[:depth]), abs=0.15)
    acceptance.add([])
    before = acceptance.expected(3)
    acceptance.add([(1, 1, 1)] * 50)  # no information about deeper positions
    assert acceptance.expected(1) > 1.8 and acceptance.expected(3) > before


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    share = st.floats(0.0, 1.0)
    return Machine(
        base=10.0,
        token=10.0 * 10 ** draw(st.floats(-3.5, 0.0)),
        draft=10.0 * 10 ** draw(st.floats(-2.5, -0.3)),
        draft_token=10.0 * 10 ** draw(st.floats(-4.0, -2.0)),
        follow=10.0 * 10 ** draw(st.floats(-2.5, -0.7)),
        follow_token=10.0 * 10 ** draw(st.floats(-4.0, -2.0)),
        overhead=draw(st.sampled_from([0.0, 0.3, 2.0, 6.0])),
        host_overhead=draw(st.sampled_from([0.0, 0.5, 3.0])),
        noise=draw(st.sampled_from([0.0, 0.02, 0.1])),
        rates=tuple(draw(share) for _ in range(4)),
        length=draw(st.sampled_from([20, 100, 500])),
        ends_by_eos=draw(st.booleans()),
    )


BREAK_EVEN = Machine(
    token=5.62,
    draft=1.0,
    draft_token=0.1,
    follow=1.0,
    follow_token=0.1,
    noise=0.0,
    rates=(1.0, 1.0, 0.0, 0.0),
    length=20,
)
"""The gain of two drafts equals the cost of the steps in vain behind short answers."""


@settings(max_examples=examples(10))
@example(machine=BREAK_EVEN, num_requests=7, seed=0)
@given(machine=machines(), num_requests=st.sampled_from([1, 2, 7, 64]), seed=st.integers(0, 1000))
def test_adaptive_depth_never_loses(machine: Machine, num_requests: int, seed: int) -> None:
    """If the gain of drafts equals their cost, measurements with 10 % noise do not hide a small loss for long."""
    found = simulate(machine, seed).run(4000, num_requests)
    assert gain(found, num_requests) >= (0.93 if machine.noise > 0.05 else 0.98)
