"""Simulated days of the production scheduler with `--autopilot`: changes settle."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.tuning.costs.step_cost import StepCost, StepShape
from moe_engine.tuning.simulator.fleet import Fleet, FleetSpec
from moe_engine.tuning.simulator.replica_spec import ReplicaSpec
from moe_engine.tuning.simulator.workload import Arrival, Fixed, Numbers
from tests.examples import FACTOR

HOUR = 3600.0
DAYS = 7 if FACTOR > 1 else 2


@dataclass(frozen=True)
class Linear:
    """Steps of 0.3 s and more: the peak load exceeds the engine's capacity."""

    def step(self, shape: StepShape) -> StepCost:
        return StepCost(0.3 + 0.02 * shape.decode_rows + 0.002 * shape.prefill_tokens)


def days(rng: random.Random) -> Iterator[Arrival]:
    """Diurnal: one request in 5 min at night, one in 24 s at noon; bursts of 40 every three hours or so."""
    now, numbers, burst = 0.0, Numbers(1 << 40), 0.0
    while now < DAYS * 24 * HOUR:
        now += rng.expovariate(1 / 24 * (0.54 - 0.46 * math.cos(2 * math.pi * now / (24 * HOUR))))
        count = 1
        if now > burst:
            count, burst = 40, now + rng.expovariate(1 / (3 * HOUR))
        for _ in range(count):
            length = rng.randint(50, 500)
            first, new = numbers.take(length), rng.randint(8, 40)
            yield Arrival(now, list(range(first, first + length)), new, 200)


def test_no_oscillation_in_days() -> None:
    config = SchedulerConfig(
        num_slots=8192, context_len=1024, max_rows=32, chunked_prefill_size=512, autopilot=True, ttft_slo=5.0,
        itl_slo=1.0,
    )  # fmt: skip
    fleet = Fleet(FleetSpec(ReplicaSpec(config, Linear())), Fixed(days(random.Random(random.getrandbits(32))), 0))
    scheduler = fleet.replicas[0].groups[0].scheduler
    assert scheduler.autopilot is not None
    moments: list[float] = []
    settings = scheduler.table.settings
    settings.on_change.append(lambda: moments.append(fleet.replicas[0].now))
    fleet.run()
    counts = scheduler.autopilot.counts
    assert len(fleet.recorder.answers) > 1400 * DAYS and counts.tried > 0
    by_hour = [sum(hour * HOUR <= moment < (hour + 1) * HOUR for moment in moments) for hour in range(DAYS * 24)]
    assert max(by_hour) <= 8  # changes and their reversals
    assert sum(by_hour[24:]) <= (DAYS - 1) * 24 * 2
