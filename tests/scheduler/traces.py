"""Traces for simulated schedulers: requests that arrive and are aborted at random, steps that fail at random."""

from __future__ import annotations

import random
from collections.abc import Callable

from moe_engine.errors import InputError
from moe_engine.types import Request
from tests.scheduler.simulator import Simulation, make_request
from tests.scheduler.tier_simulator import TierSimulation


def play_arrivals(
    sim: Simulation, rng: random.Random, make: Callable[[int], Request], num_requests: int, arrival: float, abort: float
) -> None:
    """Adds requests `make(0)`, `make(1)`, ... at random, aborts some, and runs to the end. Refusals are allowed."""
    added = 0
    while added < num_requests:
        while added < num_requests and rng.random() < arrival:
            request = make(added)
            added += 1
            try:
                sim.add(request)
            except InputError as error:
                del sim.outcomes[request.rid]
                assert error.status in (400, 503)
        if rng.random() < abort and sim.outcomes:
            sim.abort(rng.choice(list(sim.outcomes)))
        sim.turn()
    sim.run_to_end(20_000)
    sim.check_end()


def play_failures(sim: TierSimulation, rng: random.Random, num_requests: int) -> None:
    """Requests with a few common prompts, while one step of ten fails; runs to the end."""
    prompts = [[rng.randrange(50) for _ in range(rng.randint(20, 120))] for _ in range(6)]
    for i in range(num_requests):
        sim.add(make_request(str(i), rng.choice(prompts) + [rng.randrange(50)], rng.randint(1, 20)))
        for _ in range(rng.randint(0, 8)):
            if sim.worker.queue and rng.random() < 0.1:
                failed = sim.worker.fail()
                sim.take(sim.scheduler.step_failed(failed.number, "broken"))
                assert sim.scheduler.check_integrity() == []
            sim.turn()
    sim.run_to_end()
    assert all(outcome.reason is not None for outcome in sim.outcomes.values())
    sim.check_end()
