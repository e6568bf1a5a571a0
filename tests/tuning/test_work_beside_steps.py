"""How much longer work of the frontend takes beside steps, found by a replay of requests and steps."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from moe_engine.tuning import work_beside_steps
from moe_engine.tuning.costs.measured import CostFile, Curve
from moe_engine.tuning.mixed_probe import Part

COSTS = CostFile(
    {0: Curve((1,), (0.001,))}, Curve((1,), (0.002,)), answer_seconds=0.003, entry_seconds=0.0012, idle_seconds=0.002,
    busy_seconds=0.0004, request_seconds=0.0008, results_seconds=0.0001, token_seconds=0.00004,
)  # fmt: skip


def a_part(rng: random.Random) -> Part:
    """Steps one after the other, at times with a pause, and calls at random moments; nothing is read yet."""
    now, steps = 1e9, []
    for _ in range(300):
        seconds = rng.uniform(0.001, 0.006)
        now += seconds + rng.choice([0.0, 0.0, 0.0, rng.uniform(0, 0.005)])
        steps.append((rng.randint(0, 40), 0, rng.randint(0, 1), 0, now, seconds))
    calls = sorted(rng.uniform(1e9, now) for _ in range(120))
    return Part(steps, [(called, called) for called in calls], [])


@pytest.mark.parametrize("num_groups", [1, 2])
def test_the_factor_is_found_by_the_moments_at_which_requests_are_read(num_groups: int) -> None:
    rng = random.Random(random.getrandbits(32))
    factor, parts = rng.choice(work_beside_steps.FACTORS[:15]), [a_part(rng) for _ in range(4)]
    read = []
    for part in parts:
        waits = work_beside_steps.entry_seconds(part, COSTS, num_groups, factor)
        calls = [called for called, _ in part.arrivals]
        arrivals = [(called, called + wait * rng.uniform(0.98, 1.02)) for called, wait in zip(calls, waits)]
        read.append(replace(part, arrivals=arrivals))
    found = work_beside_steps.factor(read, COSTS, num_groups)
    assert abs(math.log(found / factor)) <= math.log(1.05) * 1.01
    noisy = [
        replace(part, arrivals=[(a, a + (b - a) * rng.lognormvariate(0, 1.0)) for a, b in part.arrivals])
        for part in read
    ]
    assert work_beside_steps.factor(noisy, COSTS, num_groups) <= 1.1 * factor  # it is rather too small than too large
    assert work_beside_steps.factor([], COSTS) == 1.0


def test_a_request_among_steps_waits_for_the_results_before_it() -> None:
    """Work of the request, its way, and the results of a step whose work takes the frontend when it comes."""
    begin = 1e9
    steps = [(10, 0, 0, 0, begin + 0.010, 0.010), (10, 0, 0, 0, begin + 0.020, 0.010)]
    part = Part(steps, [(begin + 0.0101, 0.0), (begin + 0.0150, 0.0), (begin + 0.5, 0.0)], [])
    results = COSTS.results_seconds + 10 * COSTS.token_seconds
    behind, free, idle = work_beside_steps.entry_seconds(part, COSTS)
    ready = max(0.0001 + COSTS.way_seconds + COSTS.busy_seconds, results)
    assert behind == pytest.approx(ready - 0.0001 + COSTS.request_seconds, abs=1e-6)
    assert free == pytest.approx(COSTS.entry_seconds + COSTS.busy_seconds, abs=1e-6)
    assert idle == pytest.approx(COSTS.entry_seconds, abs=1e-6)
    slower = work_beside_steps.entry_seconds(part, COSTS, value=2.0)
    assert slower[2] == pytest.approx(COSTS.entry_seconds + COSTS.request_seconds, abs=1e-6)


def test_lone_answers_take_as_long_as_before() -> None:
    factor = random.uniform(1.0, 2.0)
    slower = COSTS.beside_steps(factor)
    assert slower.request_seconds == pytest.approx(factor * COSTS.request_seconds)
    assert (slower.way_seconds, slower.delivery_seconds) == pytest.approx((COSTS.way_seconds, COSTS.delivery_seconds))
    assert slower.answer_seconds + slower.idle_seconds == pytest.approx(COSTS.answer_seconds + COSTS.idle_seconds)
    assert COSTS.beside_steps(9.0).idle_seconds == 0.0
