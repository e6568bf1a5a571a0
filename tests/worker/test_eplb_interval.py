"""The EPLB interval of `--autopilot`, with the production planner on artificial loads."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.placement.moves import plan_moves
from moe_engine.parallel.placement.placement import ExpertPlacement
from moe_engine.parallel.placement.program import decode_moves
from moe_engine.worker.eplb.eplb_interval import LEAST_PASSES, RANGE, VERDICTS, EPLBInterval
from moe_engine.worker.eplb.eplb_planner import Planner

LAYERS, EXPERTS, RANKS = 3, 64, 8
LAYOUT = ExpertLayout(EXPERTS, RANKS, 8)
Load = Callable[[int], NDArray[np.float64]]


def intervals(load: Load, passes: int, rebalances: int, adaptive: bool = True) -> list[int]:
    """The intervals of `rebalances`; `load` returns the load [L, E] of a pass."""
    planner = Planner(LAYOUT, "auto", ThreadPoolExecutor(1))
    interval, current, after = EPLBInterval(passes, adaptive), ExpertPlacement.trivial(LAYOUT, LAYERS), 1.0
    now, found = 0, []
    for _ in range(rebalances):
        counts = sum(load(number) for number in range(now, now + interval.passes, max(interval.passes // 20, 1)))
        now += interval.passes
        plan = planner.plan(np.asarray(counts).astype(np.int64), current, 1.0)
        if plan.unmoved is not None:
            interval.after_rebalance(plan.before - plan.unmoved, after - plan.before)
        after, table = plan.after, current.physical_to_logical.copy()
        for layer in decode_moves(plan.program, current):
            for chunk in layer:
                table[chunk.layer] = chunk.table
        current = ExpertPlacement(table, EXPERTS, RANKS)
        found.append(interval.passes)
    planner.close()
    return found


def zipf(rng: np.random.Generator) -> NDArray[np.float64]:
    return np.stack([rng.permutation(1e5 / np.arange(1, EXPERTS + 1) ** 0.9) for _ in range(LAYERS)])


def test_a_steady_load_needs_few_rebalances() -> None:
    load = zipf(np.random.default_rng(random.getrandbits(32)))
    found = intervals(lambda now: load, 100, 8)
    assert found[0] == found[1] == 100 and found[-1] == 100 * RANGE
    assert intervals(lambda now: load, 100, 4, adaptive=False) == [100] * 4


def test_a_load_without_a_memory_needs_few_rebalances() -> None:
    """Counts have no information about later passes."""
    rng = np.random.default_rng(random.getrandbits(32))
    loads: dict[int, NDArray[np.float64]] = {}
    assert intervals(lambda now: loads.setdefault(now // 100, zipf(rng)), 100, 12)[-1] > 100


def test_a_load_that_moves_slowly_needs_more_rebalances() -> None:
    """From one distribution to the next in 8000 passes: plans of 1600 passes are late, and still gain."""
    rng, loads = np.random.default_rng(random.getrandbits(32)), {}

    def load(now: int) -> NDArray[np.float64]:
        number, part = divmod(now / 8000, 1)
        ends = [loads.setdefault(int(number) + i, zipf(rng)) for i in (0, 1)]
        return ends[0] * (1 - part) + ends[1] * part

    found = intervals(load, 1600, 24)
    assert min(found) < 1600 and found[-1] <= 3200


@pytest.mark.parametrize("passes", [1, 10, 50, 1000])
def test_bounds(passes: int) -> None:
    interval = EPLBInterval(passes, True)
    for _ in range(20 * VERDICTS):
        interval.after_rebalance(0.5, 0.5)
    assert interval.passes == max(passes // RANGE, min(LEAST_PASSES, passes))
    for _ in range(20):
        interval.after_rebalance(0.0, 0.5)
    assert interval.passes == passes * RANGE


@pytest.mark.parametrize(
    "judged",
    [
        [(0.5, 0.0)] * 4,  # a gain that lasts
        [(0.03, 0.5)] * 4,  # no gain to lose
        [(0.5, 0.5), (0.5, 0.0)] * 4,  # lost once, by chance
    ],
)
def test_the_interval_stays(judged: list[tuple[float, float]]) -> None:
    interval = EPLBInterval(1000, True)
    for gained, lost in judged:
        interval.after_rebalance(gained, lost)
    assert interval.passes == 1000


def test_moves_of_a_plan_reach_its_placement() -> None:
    rng = np.random.default_rng(random.getrandbits(32))
    planner = Planner(LAYOUT, "auto", ThreadPoolExecutor(1))
    current, counts = ExpertPlacement.trivial(LAYOUT, LAYERS), zipf(rng).astype(np.int64)
    first = planner.plan(counts, current, 1.0)
    assert first.unmoved is None and first.after > first.before
    moved = planner.place(counts, current)
    assert len(list(plan_moves(current, moved))) > 0
    second = planner.plan(counts, moved, 1.0)
    assert second.unmoved == pytest.approx(first.before) and second.before == pytest.approx(first.after)
    planner.close()
