"""Fits the planner's constants of each engine to measured points, and evaluates them on held-out points.

    python -m benchmarks.planner_fit                 fit on all points of benchmarks/planner_points, write the constants
    python -m benchmarks.planner_fit --halves 5      fit on random halves, evaluate on the other halves
    python -m benchmarks.planner_fit --groups 5      the same with whole (model, GPU, engine) groups held out
    python -m benchmarks.planner_fit --leave-out gpu  each GPU (or model) is held out once; of engines the points of all
                                                      others are fitted together

An evaluation is printed, and written with --json FILE only.

A mixed model in logarithms with a robust loss, by Levenberg-Marquardt: the constants of an engine, with a prior on
each, and factors of models, GPUs and forms around 1. Without the factors a slow model would look like slow hardware or
a slow host.
"""

from __future__ import annotations

import datetime
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.planner_points import Point, read_points
from moe_engine.tuning.costs.efficiency import FOLDER, Efficiency, deviation_keys
from moe_engine.tuning.costs.form import precision_of
from moe_engine.tuning.costs.roofline import RooflineCost
from moe_engine.tuning.hardware.table import Cluster, parse_cluster
from moe_engine.tuning.planner.candidate import Candidate
from moe_engine.tuning.planner.memory import EstimatedMemory
from moe_engine.tuning.planner.predict import accepted_drafts
from moe_engine.tuning.planner.steady import Load, MeasuredTimes, Steady, queued, steady_state

PRIOR = {
    "hbm": (0.7, 0.2), "experts_hbm": (0.6, 0.3), "flops": (0.55, 0.2), "attention_hbm": (0.6, 0.3),
    "kernel_us": (2.3, 0.7), "prefill_kernel_us": (3.6, 0.8), "step_us": (500, 0.5), "row_us": (5, 0.4),
    "message": (1.5, 0.5), "token_ns": (7, 0.35), "prompt_weight": (1, 0.4), "queue": (0.3, 1.0),
    "request_ms": (15, 0.8),
}  # fmt: skip
"""Constants with their prior: median, and standard deviation of the logarithm. Rates of products are those of published
kernels: DeepGEMM reaches 0.5 to 0.7 of the peak in FP8."""

MOST = {"hbm": 0.92, "experts_hbm": 0.92, "attention_hbm": 0.92, "flops": 0.85}
KV = {"trtllm": "fp8"}
PROMPTS_FIRST = {"sglang"}
MEMORY = {"sglang": 0.82}  # of its scripts (--mem-fraction-static)
SPREAD = 0.15
"""Relative error beyond which a point counts linearly."""

TTFT_WEIGHT = 0.25
DEVIATION = 0.15
"""Standard deviation of the logarithm of a factor of each level of `deviation_keys`."""

REFRESH = 4
"""Rounds of a fit for which slopes are kept, with Broyden's correction."""

Residuals = np.ndarray  # [points, 2]: log(predicted / measured) of TPOT and TTFT


def share_of(engine: str, x: np.ndarray) -> Efficiency:
    """The constants from logarithms relative to the prior."""
    values: dict[str, Any] = {name: PRIOR[name][0] * math.exp(each) for name, each in zip(PRIOR, x)}
    return Efficiency(
        engine, kv=KV.get(engine, "bf16"), memory=MEMORY.get(engine, Efficiency.memory),
        prompts_first=engine in PROMPTS_FIRST, **values,
    )  # fmt: skip


def keys_of(point: Point) -> tuple[str, ...]:
    return deviation_keys(point.facts, precision_of(point.dtype), point.gpu, point.form)


@lru_cache
def cluster_of(gpu: str) -> Cluster:
    return parse_cluster(f"8x{gpu}")


@lru_cache(maxsize=1 << 14)
def most_running(point: Point) -> float:
    """Requests for which the memory has room in the mean of their lengths."""
    candidate = Candidate(point.form, 1, point.launch.kv, point.launch.chunk, 1)
    room = EstimatedMemory(
        point.facts, cluster_of(point.gpu), point.dtype, MEMORY.get(point.engine, Efficiency.memory)
    ).of(candidate)
    if room.refusal:  # the launch ran, so the estimate is too high
        return math.inf
    return max(1.0, room.tokens / (point.prompt + point.output / 2) * point.form.attn_dp)


def eager(share: Efficiency) -> Efficiency:
    """The constants without CUDA graphs: kernels of decodes take the time of those of prompts."""
    return replace(share, kernel_us=share.kernel_us + share.prefill_kernel_us, prefill_kernel_us=0.0)


def residuals(points: Sequence[Point], share: Efficiency) -> Residuals:
    costs: dict[tuple[Any, ...], tuple[RooflineCost, float]] = {}
    states: dict[tuple[Any, ...], Steady] = {}  # runs of a setting are predicted once
    found = []
    of_engine = {name: replace(share, prompts_first=name in PROMPTS_FIRST) for name in _engines(points)}
    for point in points:
        form, gpu, launch = point.form, point.gpu, point.launch
        if (setting := (point.setting, launch)) not in states:
            key = point.model, point.dtype, gpu, form, launch.kv, launch.graphs
            if key not in costs:
                precision, keys = precision_of(point.dtype, launch.kv, not point.facts.num_experts), keys_of(point)
                precision = replace(precision, expert_rows=launch.expert_rows)
                own = share if launch.graphs else eager(share)
                cost = RooflineCost(point.facts, form, precision, cluster_of(gpu), own, share.deviation(keys))
                costs[key] = cost, share.deviation(keys, prompt=True)
            cost, late = costs[key]
            load = Load(point.prompt, point.prompt, point.output, point.equal)
            running = min(point.concurrency, most_running(point))
            state = steady_state(
                cost, form, load, running, of_engine[point.engine], launch.chunk, point.drafts,
                accepted_drafts(point.drafts), turns=launch.turns, times=MeasuredTimes(prompt_deviation=late),
            )  # fmt: skip
            states[setting] = queued(state, load, point.concurrency / running)
        state = states[setting]
        found.append((math.log(state.tpot_s * 1e3 / point.tpot_ms), math.log(state.ttft_s * 1e3 / point.ttft_ms)))
    return np.array(found)


def fit(points: Sequence[Point], engine: str) -> Efficiency:
    """Constants, then deviations of models, GPUs and forms from them."""
    members = np.stack(list(_members(points).values()))
    x = _minimize(lambda x: residuals(points, share_of(engine, x)), members)
    share = share_of(engine, x)
    tpot = _deviations(points, residuals(points, share)[:, 0])
    share = _with(share, tpot, {})
    return _with(share, tpot, _deviations(points, residuals(points, share)[:, 1]))


def _with(share: Efficiency, tpot: dict[str, float], ttft: dict[str, float]) -> Efficiency:
    return Efficiency(**{**vars(share), "deviations": tpot, "prompt_deviations": ttft})


def _members(points: Sequence[Point]) -> dict[str, np.ndarray]:
    """The points of each key: 1 for a point that has it, else 0."""
    keys = [keys_of(point) for point in points]
    return {
        key: np.array([float(key in own) for own in keys]) for key in dict.fromkeys(key for own in keys for key in own)
    }


def _deviations(points: Sequence[Point], errors: np.ndarray) -> dict[str, float]:
    """The most probable factor of each key for residuals of one kind (iteratively reweighted least squares). Repeated
    runs of a setting count once."""
    members = _members(points)
    design, runs = np.stack(list(members.values())), Counter(point.setting for point in points)
    once = np.array([1 / runs[point.setting] for point in points])
    prior = np.eye(len(members)) * (SPREAD / DEVIATION) ** 2 * 2
    found = np.zeros(len(members))
    for _ in range(50):
        weights = once / np.sqrt(1 + ((errors + found @ design) / SPREAD) ** 2)
        before, found = found, -np.linalg.solve((design * weights) @ design.T + prior, (design * weights) @ errors)
        if np.abs(found - before).max() < 1e-4:
            break
    return {key: round(math.exp(value), 4) for key, value in zip(members, found) if abs(value) > 0.005}


def _minimize(errors: Callable[[np.ndarray], Residuals], members: np.ndarray, rounds: int = 25) -> np.ndarray:
    """Constants with the least loss, beside the best factors: of each key one on steps, so on TPOT and TTFT, and one on
    TTFT alone, as `Efficiency` has them.

    Args:
        members: [keys, points], of `_members`.
    """
    kinds = np.array([[1.0, 1.0], [0.0, 1.0]])[:, None, None, :] * members[:, :, None]  # [kind, keys, points, 2]
    factors = kinds.reshape(-1, members.shape[1], 2)
    count, damping = len(PRIOR), 1.0
    x = np.zeros(count + len(factors))
    top = np.full(len(x), np.inf)
    top[:count] = [math.log(MOST[name] / PRIOR[name][0]) if name in MOST else np.inf for name in PRIOR]
    spreads = np.array([sd for _, sd in PRIOR.values()] + [DEVIATION] * len(factors))
    prior = 2 * SPREAD**2 / spreads**2
    scale = np.array([1.0, TTFT_WEIGHT])

    def parts(x: np.ndarray) -> tuple[Residuals, Residuals, float]:
        """Residuals of the constants alone, with the factors, and the loss."""
        alone = errors(x[:count])
        r = alone + np.tensordot(x[count:], factors, 1)
        robust = 2 * SPREAD**2 * (np.sqrt(1 + (r / SPREAD) ** 2) - 1)
        return alone, r, float((robust * scale).sum() + (prior * x * x).sum())

    alone, found, best = parts(x)
    constants = np.zeros((count, *alone.shape))
    for round_ in range(rounds):
        if fresh := round_ % REFRESH == 0:
            constants = np.stack([(alone - errors(x[:count] - 0.02 * row)) / 0.02 for row in np.eye(count)])
        slopes = np.concatenate([constants, factors]).reshape(len(x), -1)
        weights = (scale / np.sqrt(1 + (found / SPREAD) ** 2)).ravel()
        normal = (slopes * weights) @ slopes.T + np.diag(prior)
        gradient = (slopes * weights) @ found.ravel() + prior * x
        free = np.flatnonzero((x < top) | (gradient > 0))  # the others stay at their limit
        normal = normal[np.ix_(free, free)]
        before = best
        for _ in range(5):
            step = np.zeros(len(x))
            step[free] = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient[free])
            trial = np.minimum(x + np.clip(step, -0.7, 0.7), top)
            tried = parts(trial)
            if tried[2] < best:
                moved, change = (trial - x)[:count], tried[0] - alone
                constants += np.multiply.outer(moved, change - np.tensordot(moved, constants, 1)) / max(
                    moved @ moved, 1e-12
                )
                x, (alone, found, best), damping = trial, tried, max(damping / 4, 1e-3)
                break
            damping *= 4
        if before - best < 1e-4 * before and fresh:
            break
    return x[:count]


def summary(name: str, errors: Residuals) -> str:
    """A row of the report: relative errors, median and 90th percentile."""
    e = np.abs(np.exp(errors) - 1)
    tpot, ttft = e[:, 0], e[:, 1]
    return (
        f"{name:<58} {len(e):>5}  TPOT {np.median(tpot):6.1%} {np.quantile(tpot, 0.9):7.1%}"
        f"  TTFT {np.median(ttft):6.1%} {np.quantile(ttft, 0.9):7.1%}"
    )


def judge(points: Sequence[Point], rounds: int, whole_groups: bool) -> list[str]:
    """Fits on one part and evaluates on the other, `rounds` times with new random splits; a report by model, GPU and
    engine."""
    lines, groups = [], defaultdict(list)
    for seed in range(rounds):
        draw, everything = random.Random(seed), []
        for engine in _engines(points):
            own = [point for point in points if point.engine == engine]
            fitted, judged = _split(own, draw, whole_groups)
            errors = residuals(judged, fit(fitted, engine))
            everything.append(errors)
            for point, each in zip(judged, errors):
                groups[f"{point.engine} {point.model} {point.gpu} {point.dtype}"].append(each)
                groups[point.engine].append(each)
        lines.append(summary(f"draw {seed}, all held-out points", np.concatenate(everything)))
    return lines + [summary(name, np.array(groups[name])) for name in sorted(groups)]


def _split(points: Sequence[Point], draw: random.Random, whole_groups: bool) -> tuple[list[Point], list[Point]]:
    """Halves by setting, so that repeated runs of a setting stay together; or by (model, GPU)."""
    names = sorted({(point.model, point.gpu) if whole_groups else point.setting for point in points})
    chosen = set(draw.sample(names, len(names) // 2))
    parts: tuple[list[Point], list[Point]] = ([], [])
    for point in points:
        parts[((point.model, point.gpu) if whole_groups else point.setting) not in chosen].append(point)
    return parts


def judge_without(points: Sequence[Point], name: str) -> list[str]:
    """Fits each engine without one GPU or model, and evaluates on it; or all engines but one together. A line for each,
    and one for all. `name`: field of `Point`."""
    lines, everything = [], []
    parts = [points] if name == "engine" else [[p for p in points if p.engine == engine] for engine in _engines(points)]
    for part in parts:
        for value in sorted({getattr(point, name) for point in part}):
            fitted = [point for point in part if getattr(point, name) != value]
            judged = [point for point in part if getattr(point, name) == value]
            engine = judged[0].engine
            errors = residuals(judged, fit(fitted, engine))
            everything.append(errors)
            lines.append(summary(f"{engine} without {value}", errors))
    return [summary(f"all, one {name} left out", np.concatenate(everything)), *lines]


def _engines(points: Sequence[Point]) -> list[str]:
    return sorted({point.engine for point in points})


def toml_of(share: Efficiency, count: int) -> str:
    """The constants as a file of `moe_engine/tuning/data`."""
    lines = [
        f"# Constants of {share.engine}: see moe_engine/tuning/costs/efficiency.py for units.",
        "[source]",
        f'points = "{count} end-to-end points of aiconfigurator-core 0.12.0 (Apache-2.0)"',
        f'date = "{datetime.date.today()}"',
        'command = "python -m benchmarks.planner_fit"',
        "",
        "[constants]",
        *(f"{name} = {getattr(share, name):.4g}" for name in PRIOR),
        f"prompts_first = {str(share.prompts_first).lower()}",
        f"memory = {share.memory}",
        f'kv = "{share.kv}"',
    ]
    for table in ("deviations", "prompt_deviations"):
        lines += ["", f"[{table}]", *(f'"{key}" = {value}' for key, value in sorted(getattr(share, table).items()))]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = report.command_parser("planner_fit", __doc__)
    parser.add_argument("--points", type=Path, help="a CSV with the columns of benchmarks/planner_points/one_pool.csv")
    parser.add_argument("--halves", type=int, default=0, help="number of random halves for the evaluation")
    parser.add_argument("--groups", type=int, default=0, help="the same with whole groups held out")
    parser.add_argument("--leave-out", choices=("gpu", "model", "engine"), help="hold out each once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the evaluation to FILE too")
    args = parser.parse_args()
    points = read_points(args.points) if args.points else read_points()
    if args.halves or args.groups or args.leave_out:
        draws = args.halves or args.groups or 1
        lines = judge_without(points, args.leave_out) if args.leave_out else judge(points, draws, bool(args.groups))
        print("\n".join(lines))
        if args.json:
            values = {"points": len(points), "draws": draws, "lines": lines}
            name = f"planner_without_{args.leave_out}" if args.leave_out else "planner_held_out"
            name += "_groups" if args.groups else ""
            print(report.write_result(name, values, path=args.json), file=sys.stderr)
        return
    for engine in _engines(points):
        own = [point for point in points if point.engine == engine]
        share = fit(own, engine)
        (FOLDER / f"{engine}.toml").write_text(toml_of(share, len(own)))
        print(summary(f"{engine}, fitted points", residuals(own, share)))


if __name__ == "__main__":
    main()
