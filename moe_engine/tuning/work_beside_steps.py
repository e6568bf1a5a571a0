"""How much longer than its CPU time the work of frontend and client takes while steps run: a replay of requests.

On a machine of few cores the threads of a step take the cores: the frontend waits for one before each piece of its
work, and finds its caches cold. The requests that were sent while a server recorded its steps pass the simulator's
frontend with longer and longer work. The right factor is that with which they are read when the server has read them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moe_engine.tuning.costs.measured import CostFile
from moe_engine.tuning.mixed_probe import Part
from moe_engine.tuning.simulator.front_end import FrontEnd
from moe_engine.tuning.simulator.workload import Arrival
from moe_engine.tuning.stats import mean, std

FACTORS = tuple(1.05**power for power in range(30))
"""From 1 to 4."""
SHORTEST = 1e-4
"""Seconds: clocks of two processes agree no better."""


def factor(parts: Sequence[Part], costs: CostFile, num_groups: int = 1) -> float:
    """The least of `FACTORS` whose mean error is that of the best one, within the standard error of their difference
    over the parts. The error: of the logarithms of the seconds until requests are read.

    A factor that is too large by a tenth saturates the simulated frontend, one that is too small does not.
    """
    if not parts:
        return 1.0
    errors = [[_error(part, costs, num_groups, value) for part in parts] for value in FACTORS]
    best = min(errors, key=mean)

    def is_as_good(found: list[float]) -> bool:
        more = [one - other for one, other in zip(found, best)]
        return mean(more) <= std(more) / math.sqrt(len(parts))

    return next(value for value, found in zip(FACTORS, errors) if is_as_good(found))


def _error(part: Part, costs: CostFile, num_groups: int, value: float) -> float:
    found = [max(received - called, SHORTEST) for called, received in part.arrivals]
    ours = entry_seconds(part, costs, num_groups, value)
    return mean([abs(math.log(max(one, SHORTEST) / real)) for one, real in zip(ours, found)])


def entry_seconds(part: Part, costs: CostFile, num_groups: int = 1, value: float = 1.0) -> list[float]:
    """Seconds from the call of each request of a part until it is read.

    Args:
        num_groups: schedulers that step together: a recorded step has the requests of one of them.
        value: how much longer than `costs` the work takes.
    """
    front = FrontEnd(costs.request_seconds * value, costs.token_seconds * value, costs.results_seconds * value)
    steps = [(step[-2] - step[-1], step[-2], round(step[0] + step[2]) * num_groups) for step in part.steps]
    calls = [called for called, _ in part.arrivals]
    reads: list[float] = []
    upcoming = iter(steps)

    def read_until(moment: float) -> None:
        while (at := front.next_read) <= moment and at < math.inf:
            reads.append(at)
            front.read()

    step = next(upcoming, None)
    for called in [*calls, math.inf]:
        while step is not None and step[1] <= called:
            read_until(step[1])
            front.tokens(step[1], step[2])
            step = next(upcoming, None)
        read_until(called)
        if called < math.inf:
            runs = step is not None and step[0] <= called
            front.add(Arrival(called, [], 0), costs.way_seconds + costs.busy_seconds * runs)
    return [at - called for called, at in zip(calls, reads)]
