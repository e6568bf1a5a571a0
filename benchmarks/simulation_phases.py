"""Where a simulation differs from the real server: its phases of requests and its steps beside the measured ones.

No command; `benchmarks.simulation_check --explain` prints the table of each run. Both sides are compared phase by
phase, so that on a busy machine an error can still be found: all phases are slower there, and only the wrong ones
differ from a calibration under the same conditions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import report
from moe_engine.tuning import step_records
from moe_engine.tuning.phases import PHASES
from moe_engine.tuning.stats import mean, median, percentile

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
TOKENS = (32, 64, 128, 256, 512, 1024, 2048)
LEAST_STEPS = 3

Step = Sequence[float]
"""Requests that decode, prompt tokens, ..., seconds."""


def phase_table(real: Sequence[dict[str, float]], simulated: Sequence[dict[str, float]]) -> str:
    """Median, mean and p99 of each phase in milliseconds, real / simulated."""
    rows = []
    for name in PHASES:
        sides = [[one[name] * 1e3 for one in side if name in one] for side in (real, simulated)]
        if all(sides):
            figures = [[f(side) for side in sides] for f in (median, mean, lambda side: percentile(side, 99))]
            rows.append([name, *(f"{pair[0]:.2f} / {pair[1]:.2f}" for pair in figures)])
    return report.table(["phase, ms: real / simulated", "median", "mean", "p99"], rows)


def step_table(real: Iterable[Step], simulated: Iterable[Step]) -> str:
    """Steps by kind: number and median milliseconds, real / simulated; and all seconds of the kind."""
    sides = [_by_kind(steps) for steps in (real, simulated)]
    rows = []
    for kind in sorted({*sides[0], *sides[1]}):
        found = [side.get(kind, []) for side in sides]
        if min(map(len, found)) >= LEAST_STEPS:
            cells = [[len(one), f"{median(one) * 1e3:.2f}", f"{mean(one) * 1e3:.2f}"] for one in found]
            rows.append([_name(kind), *(f"{a} / {b}" for a, b in zip(*cells))])
    for word, chosen in (("decode", False), ("prompts", True)):
        sums = [sum(sum(v) for kind, v in side.items() if (kind[0] > 0) is chosen) for side in sides]
        counts = [sum(len(v) for kind, v in side.items() if (kind[0] > 0) is chosen) for side in sides]
        rows.append([f"all {word}, seconds", f"{counts[0]} / {counts[1]}", f"{sums[0]:.2f} / {sums[1]:.2f}", ""])
    return report.table(["step, ms: real / simulated", "number", "median", "mean"], rows)


def _by_kind(steps: Iterable[Step]) -> dict[tuple[int, int], list[float]]:
    """Seconds by prompt tokens and decoding requests, both in classes."""
    found = defaultdict[tuple[int, int], list[float]](list)
    for rows, tokens, *_, seconds in steps:
        found[_class(tokens, TOKENS), _class(rows, ROWS)].append(seconds)
    return dict(found)


def _class(count: float, limits: Sequence[int]) -> int:
    """The least limit that is not below a count; 0 for 0."""
    return next((limit for limit in limits if count <= limit), limits[-1] * 2) if count else 0


def _name(kind: tuple[int, int]) -> str:
    tokens, rows = kind
    parts = [f"up to {tokens} prompt tokens"] if tokens else []
    return ", ".join(parts + ([f"up to {rows} requests"] if rows else []))


def num_steps(info: dict[str, Any]) -> list[int]:
    """Steps so far, by scheduler, of a server's `/server_info`."""
    return [state["total_steps"] for state in info["internal_states"]]


def step_times(info: dict[str, Any], before: list[int]) -> list[Step]:
    """Steps of all schedulers together since `num_steps`; of a server with `--record-step-times`."""
    states = []
    for state, count in zip(info["internal_states"], before):
        new = state["step_times"][count - state["total_steps"] :] if count < state["total_steps"] else []
        states.append({"step_times": new, "total_steps": state["total_steps"]})
    steps = step_records.joint_steps(states)
    return [(sum(p[0] for p in parts), sum(p[1] for p in parts), mean([p[-1] for p in parts])) for parts in steps]
