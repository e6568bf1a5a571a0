"""EPLB throttle: moves cost the same share of short and long steps, and a chunk has enough passes for its transfer."""

from __future__ import annotations

import pytest

from moe_engine.worker.eplb.eplb_throttle import MAX_PASSES, MAX_SHARE, EPLBThrottle


def pace(step: float, pause: float, way: float) -> EPLBThrottle:
    made = EPLBThrottle()
    for _ in range(5):
        made.add_pass(step)
        made.add_move(pause, way)
    return made


def test_one_pass_per_move_until_measured() -> None:
    made = EPLBThrottle()
    assert made.passes_per_move == 1
    made.add_pass(0.01)
    assert made.passes_per_move == 1


@pytest.mark.parametrize(
    ("step", "pause", "way", "passes"),
    [
        (0.050, 0.001, 0.020, 1),  # a large model
        (0.050, 0.0, 0.0, 1),  # below the resolution of the clock
        (0.050, 0.001, 0.120, 3),  # over a slow network: passes do not wait for the transfer
        (0.001, 0.0001, 0.0005, 3),  # a small one: the pause alone is 10 % of a step
        (0.001, 0.010, 0.0, MAX_PASSES),  # bounded
    ],
)
def test_passes_of_a_move(step: float, pause: float, way: float, passes: int) -> None:
    found = pace(step, pause, way).passes_per_move
    assert found == passes
    assert found == MAX_PASSES or (pause <= MAX_SHARE * step * found and way <= step * found)


def test_a_pass_after_idle_time_is_ignored() -> None:
    made = pace(0.010, 0.001, 0.002)
    before = made.passes_per_move
    made.add_pass(60.0)
    assert made.passes_per_move == before == 3
