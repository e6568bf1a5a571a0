"""Adaptive draft depth: it finds the best depth, disables drafting in time, and costs at most 2 % where drafts fail."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.scheduler.draft_depth import LONGEST_BACKOFF, AutoDepth, FixedDepth, StepOutcome, make_policy
from moe_engine.types import SpeculationConfig
from tests.scheduler.depth_simulator import DepthSimulation, Machine, NoDrafts

AUTO = SpeculationConfig("nextn", 4, auto_depth=True)
HOPELESS = (0.0, 0.0, 0.0, 0.0)
GOOD = (0.9, 0.9, 0.9, 0.9)


def simulate(machine: Machine, seed: int = 0) -> DepthSimulation:
    return DepthSimulation(make_policy(AUTO), machine, random.Random(seed))


def gain(found: DepthSimulation, num_requests: int) -> float:
    """Throughput relative to the same machine without speculation."""
    plain = DepthSimulation(NoDrafts(), found.machine, random.Random(1))
    return found.speed / plain.run(800, num_requests).speed


def best_gain(found: DepthSimulation, num_requests: int) -> float:
    """The same of the best constant depth, or of no speculation."""
    policies = [FixedDepth(depth) for depth in range(1, AUTO.num_steps + 1)]
    fixed = [DepthSimulation(policy, found.machine, random.Random(1)).run(800, num_requests) for policy in policies]
    return max(1.0, *(gain(simulation, num_requests) for simulation in fixed))


def test_a_fixed_number_of_steps() -> None:
    policy = make_policy(SpeculationConfig("ngram", 3))
    assert isinstance(policy, FixedDepth) and policy.enabled
    policy.observe(StepOutcome(4, 3, [(3, 0)] * 4, 99.0, 98.0))
    assert policy.choose(4, 4) == policy.choose(1, 0) == 3
    assert isinstance(make_policy(AUTO), AutoDepth)


@pytest.mark.parametrize("num_requests", [1, 5, 64])
def test_hopeless_drafts_disable_drafting_soon(num_requests: int) -> None:
    found = simulate(Machine(rates=HOPELESS, draft=1.0)).run(60, num_requests)
    assert not found.enabled[-1] and found.depths[-1] == 0
    assert sum(found.depths) < 50


@pytest.mark.parametrize("num_requests", [1, 8])
def test_good_cheap_drafts_use_the_max_depth(num_requests: int) -> None:
    found = simulate(Machine(rates=GOOD, token=0.001, draft=0.1)).run(400, num_requests)
    assert median(found.depths[30:]) == 4 and all(found.enabled)
    assert gain(found, num_requests) > 3


@pytest.mark.parametrize("num_requests", [1, 8, 32])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("noise", [0.02, 0.2, 0.5])
def test_auto_is_near_the_best_constant_depth(num_requests: int, rate: float, noise: float) -> None:
    """Also with noisy times, with steps that take 20 times as long, and with first steps that compile kernels."""
    noisy = noise > 0.1
    machine = Machine(rates=(rate,) * 4, token=0.05, noise=noise, outliers=0.01 * noisy, first=noisy)
    found = simulate(machine).run(200, num_requests).change().run(2000, num_requests)
    assert gain(found, num_requests) > (0.9 if noisy else 0.95) * best_gain(found, num_requests)


@pytest.mark.parametrize(("overhead", "pays"), [(1.0, True), (12.0, False)])
def test_host_overhead_is_part_of_the_cost(overhead: float, pays: bool) -> None:
    """A speculative step without drafts costs more than a plain one; only a plain step shows how much."""
    machine = Machine(rates=(0.9, 0.2, 0.2, 0.2), token=0.1, draft=0.3, overhead=overhead, host_overhead=1.0, length=60)
    assert (machine.best_depth(2) > 0) == pays
    found = simulate(machine).run(400, 2)
    found.change().run(2000, 2)
    assert (median(found.depths) > 0) == pays
    assert gain(found, 2) > (1.2 if pays else 0.98)


def test_the_choice_depends_on_the_batch_size() -> None:
    """Small and full batches alternate: each has its own costs."""
    machine = Machine(base=10.0, token=0.6, draft=0.2, rates=(0.7, 0.7, 0.7, 0.7), length=30)
    assert machine.best_depth(64) == 0 and machine.best_depth(1) >= 3
    found = simulate(machine)
    depths: dict[int, list[int]] = {1: [], 64: []}
    for _ in range(12):
        for num_requests in depths:
            found.change().run(150, num_requests)
            depths[num_requests] += found.depths
    assert median(depths[64]) == 0 and median(depths[1]) >= 3


def test_acceptance_is_learned_by_batch_size() -> None:
    class Diverse(DepthSimulation):
        def run(self, num_steps: int, num_requests: int) -> DepthSimulation:
            self.machine = Machine(rates=GOOD if num_requests == 1 else (0.9, 0.0, 0.0, 0.0), draft=1.0)
            return super().run(num_steps, num_requests)

    found = Diverse(make_policy(AUTO), Machine(), random.Random(0))
    for _ in range(6):
        found.change().run(100, 1)
        alone = median(found.depths)
        found.change().run(100, 8)
        together = median(found.depths)
    assert (alone, together) == (4, 1)


def test_drafts_with_low_acceptance_at_depth_stay_short() -> None:
    found = simulate(Machine(rates=(0.9, 0.1, 0.1, 0.1), draft=2.0)).run(600, 4)
    assert median(found.depths[200:]) == 1


@pytest.mark.parametrize(
    ("before", "after", "deeper"),
    [
        ({"token": 0.01}, {"token": 4.0}, False),  # the step is now bound by arithmetic
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
    found = simulate(Machine(rates=HOPELESS, draft=1.0)).run(20_000, 4)
    retries = [i for i in range(1, len(found.enabled)) if found.enabled[i] and not found.enabled[i - 1]]
    assert 4 <= len(retries) <= 12
    gaps = [b - a for a, b in pairwise(retries)]
    assert gaps[-1] > 3 * gaps[0] and gaps[-1] > LONGEST_BACKOFF
    found.change(rates=GOOD).run(2 * LONGEST_BACKOFF, 4)
    assert median(found.depths[-500:]) == 4, "better drafts were never detected"


def test_steps_that_all_have_prompts_get_one_draft() -> None:
    """Their seconds are no measurement of the decodes."""
    policy = make_policy(AUTO)
    depths = []
    for _ in range(100):
        depths.append(policy.choose(4, 4))
        policy.observe(StepOutcome(4, depths[-1], [(depths[-1], depths[-1])] * 4))
    assert policy.enabled and depths[-1] == max(depths) == 1


def test_requests_that_the_drafter_did_not_follow_get_no_drafts() -> None:
    policy = make_policy(AUTO)
    for _ in range(100):
        depth = policy.choose(2, 2)
        policy.observe(StepOutcome(2, depth, [(depth, depth)] * 2, 1.0, 1.0))
    assert policy.choose(2, 0) == 0 and policy.choose(2, 2) == AUTO.num_steps


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


@settings(max_examples=20, deadline=None)
@given(machine=machines(), num_requests=st.sampled_from([1, 2, 7, 64]), seed=st.integers(0, 1000))
def test_adaptive_depth_never_loses(machine: Machine, num_requests: int, seed: int) -> None:
    found = simulate(machine, seed).run(4000, num_requests)
    assert gain(found, num_requests) >= 0.98
