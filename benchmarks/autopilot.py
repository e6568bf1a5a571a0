"""The autopilot against fixed settings, in the simulator: ``python -m benchmarks.autopilot [options]``.

Six loads on one engine with the step costs of a cost file (`moe-engine calibrate`). For each: a grid of fixed settings,
then the settings of the launch and two bad ones, each without and with `--autopilot`. A score counts the time after the
first two minutes: tokens a second for a closed loop of clients, the inverse of the mean latency for an open loop, the
share of requests within the SLO if one is given.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from moe_engine.planning.output.scheduler_limits import CPU_DELAYED_TOKENS
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.tuning.costs.measured import CostFile, MeasuredCosts
from moe_engine.tuning.simulator.arrivals import arrival_times
from moe_engine.tuning.simulator.fleet import Fleet, FleetSpec
from moe_engine.tuning.simulator.replica_spec import ReplicaSpec
from moe_engine.tuning.simulator.workload import Arrival, Fixed, Limited, Numbers, Workload

COSTS = Path(__file__).parent / "results" / "cost_file_390m.json"
SETTLED = 120.0
"""Seconds excluded from the score."""
CONFIG = SchedulerConfig(num_slots=24_576, context_len=4096, max_rows=64, chunked_prefill_size=2048)
GRID: dict[str, tuple[Any, ...]] = {
    "max_running_requests": (16, 64),
    "chunked_prefill_size": (256, 2048),
    "max_consecutive_prefills": (1, 32),
    "schedule_conservativeness": (0.1, 1.0),
    "schedule_policy": ("fcfs", "lpm"),
}
CPU_LAUNCH = {"max_consecutive_prefills": 1, "max_delayed_tokens": CPU_DELAYED_TOKENS}
"""What a launch on a CPU has without the autopilot; beside the grid."""
BAD_STARTS: dict[str, dict[str, Any]] = {
    "few rows": {"max_running_requests": 1},
    "small chunks, conservative": {"chunked_prefill_size": 64, "schedule_conservativeness": 4.0},
}


class Prompts:
    """Prompts of unique tokens, after a shared prefix if one is given."""

    def __init__(self) -> None:
        self._numbers = Numbers(1 << 30)

    def of(self, length: int, prefix: range = range(0)) -> list[int]:
        first = self._numbers.take(length)
        return [*prefix, *range(first, first + length)]


Drawn = tuple[list[int], int, int]
"""Prompt, length of the answer, max_new_tokens."""
Draw = Callable[[random.Random, Prompts, float], Drawn]
"""Draws a request; the number is the past share of the time."""


@dataclass(frozen=True)
class Load:
    """`times`: of arrivals; `clients` of a closed loop (0: open loop) have none, and end with the simulation."""

    draw: Draw
    times: Callable[[random.Random, float], Iterator[float]] = lambda rng, seconds: itertools.repeat(0.0)
    clients: int = 0
    ttft: float | None = None
    itl: float | None = None

    def arrivals(self, rng: random.Random, seconds: float) -> Iterator[Arrival]:
        prompts = Prompts()
        for now in itertools.takewhile(lambda now: now <= seconds, self.times(rng, seconds)):
            yield Arrival(now, *self.draw(rng, prompts, now / seconds))


def uniform(prompt: tuple[int, int], answer: tuple[int, int], limit: int) -> Draw:
    """Lengths between these, and this max_new_tokens."""
    return lambda rng, prompts, share: (prompts.of(rng.randint(*prompt)), rng.randint(*answer), limit)


def shared_prefix(rng: random.Random, prompts: Prompts, share: float) -> Drawn:
    """Of one of 40 groups with 700 tokens in common."""
    first = 1 + rng.randrange(40) * 700
    return prompts.of(rng.randint(16, 48), range(first, first + 700)), rng.randint(16, 48), 64


def mixed_classes(rng: random.Random, prompts: Prompts, share: float) -> Drawn:
    if rng.random() < 0.12:
        return prompts.of(rng.randint(1200, 2000)), rng.randint(4, 16), 64
    return prompts.of(rng.randint(32, 96)), rng.randint(32, 96), 128


def longer_prompts(rng: random.Random, prompts: Prompts, share: float) -> Drawn:
    return prompts.of(int(64 + 500 * share)), rng.randint(24, 72), 128


def fewer_arrivals(rng: random.Random, seconds: float) -> Iterator[float]:
    now = 0.0
    while now < seconds:
        yield now
        now += rng.expovariate(6.5 - 4.3 * (now / seconds))


LOADS = {
    "bursty": Load(
        uniform((64, 192), (32, 64), 128), lambda rng, seconds: arrival_times("gamma", 5.5, rng, burstiness=0.15)
    ),
    "long prompts": Load(uniform((1000, 2000), (24, 64), 256), clients=24),
    "huge max_new_tokens": Load(uniform((32, 96), (16, 64), 2000), clients=128),
    "shared prefixes": Load(shared_prefix, clients=96),
    "mixed SLO classes": Load(
        mixed_classes, lambda rng, seconds: arrival_times("poisson", 3.2, rng), ttft=1.5, itl=0.25
    ),
    "drifting": Load(longer_prompts, fewer_arrivals),
}


def run(load: Load, settings: dict[str, Any], costs: CostFile, seconds: float, seed: int, autopilot: bool) -> Fleet:
    """Simulates `seconds` of a load."""
    config = replace(CONFIG, autopilot=autopilot, ttft_slo=load.ttft, itl_slo=load.itl)
    spec = FleetSpec(ReplicaSpec(config, MeasuredCosts(costs), **costs.disturbances))
    rng = random.Random(seed)
    workload: Workload = Fixed(load.arrivals(rng, seconds), 0)
    if load.clients:
        workload = Stopped(Limited(workload, load.clients), seconds)
    fleet = Fleet(spec, workload, answer_seconds=costs.answer_seconds, seed=seed)
    fleet.replicas[0].groups[0].scheduler.table.settings.set(settings)
    if (pilot := fleet.replicas[0].groups[0].scheduler.autopilot) is not None:
        pilot.adopt()
    fleet.run()
    return fleet


class Stopped:
    """Later times are not retried."""

    def __init__(self, inner: Workload, seconds: float) -> None:
        self._inner, self._seconds, self.total = inner, seconds, 0

    def first(self) -> Iterator[Arrival]:
        return self._inner.first()

    def after(self, arrival: Arrival, finished: float) -> Arrival | None:
        return self._inner.after(arrival, finished) if finished < self._seconds else None


def score(load: Load, fleet: Fleet, seconds: float) -> float:
    answers = [a for a in fleet.recorder.answers if a.success and a.started >= SETTLED]
    if load.ttft is not None and load.itl is not None:
        good = sum(a.ttft <= load.ttft and (a.tpot is None or a.tpot <= load.itl) for a in answers)
        return good / max(len(answers), 1)
    if load.clients:
        ended = [a for a in fleet.recorder.answers if SETTLED <= a.started + a.latency <= seconds]
        return sum(a.prompt_len + a.output_len for a in ended) / (seconds - SETTLED)
    return len(answers) / sum(a.latency for a in answers)


def measure(name: str, costs: CostFile, seconds: float, seed: int) -> dict[str, Any]:
    load = LOADS[name]
    grid: list[tuple[float, dict[str, Any]]] = []
    names = [name for name in GRID if load.itl is not None or name != "max_consecutive_prefills"]
    for values in itertools.product(*(GRID[name] for name in names)):
        settings = dict(zip(names, values))
        grid.append((score(load, run(load, settings, costs, seconds, seed, False), seconds), settings))
    grid.append((score(load, run(load, CPU_LAUNCH, costs, seconds, seed, False), seconds), CPU_LAUNCH))
    best, best_settings = max(grid, key=lambda found: found[0])
    starts = []
    for start, settings in {"launch": {}, **BAD_STARTS}.items():
        fixed = score(load, run(load, settings, costs, seconds, seed, False), seconds)
        fleet = run(load, settings, costs, seconds, seed, True)
        group = fleet.replicas[0].groups[0]
        pilot = group.scheduler.autopilot
        assert pilot is not None
        value = score(load, fleet, seconds)
        starts.append(
            {
                "start": start,
                "fixed": fixed,
                "autopilot": value,
                "of_best": value / best,
                "over_start": value / max(fixed, 1e-9),
                "tried": pilot.counts.tried,
                "kept": pilot.counts.kept,
                "undone": pilot.counts.undone,
                "settings": group.scheduler.table.settings.values(),
            }
        )
        print(
            f"{name:20} {start:27} fixed {fixed / best:5.2f} of the best, autopilot {value / best:5.2f}; changes: "
            f"{pilot.counts.kept} kept, {pilot.counts.undone} undone",
            flush=True,
        )
    worst = min(score for score, _ in grid)
    return {"load": name, "seed": seed, "best": best, "best_settings": best_settings, "worst": worst, "starts": starts}


def main() -> None:
    parser = report.command_parser("autopilot", __doc__)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--cost-file", default=str(COSTS))
    parser.add_argument("--seconds", type=float, default=480.0, help="simulated, of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the load; each is a row")
    parser.add_argument("--log", action="store_true", help="print the autopilot's log lines")
    report.add_result_options(parser)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO if args.log else logging.ERROR, format="    %(message)s")
    costs = CostFile.load(args.cost_file)
    rows = []
    for name, seed in itertools.product(args.loads, args.seeds):
        rows.append(measure(name, costs, args.seconds, seed))
        report.write_if_asked(args, "autopilot", {"rows": rows, "seconds": args.seconds})


if __name__ == "__main__":
    main()
