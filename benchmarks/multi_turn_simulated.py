"""`multi_turn_load` for DeepSeek V3 on 16 H200, simulated: ``python -m benchmarks.multi_turn_simulated``.

The production scheduler runs on a simulated clock, with the step costs of `moe-engine plan` and the KV cache of the
memory ledger. Sessions in a closed loop, at `--loads` times the KV cache: each sends all earlier text and a new input,
reads the answer, and pauses. Two variants, each measured at every load:

- recompute: no KV is held for sessions (``--session-hold 0``)
- hold: the KV of sessions that fit is held (the default)

Reported: output tokens per second of turns that ended in the measured interval; time to first token of returning turns;
the cached share of prompts. Target: with hold the throughput never falls below 0.95 of its peak at a larger load.
Simulated without a host tier.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.multi_turn_load import draw, summary, verdicts
from benchmarks.step_costs.models import config_of
from moe_engine.cli import simulate
from moe_engine.config.args import EngineArgs
from moe_engine.tuning.simulator.agents import Agents, AgentShape
from moe_engine.tuning.simulator.fleet import Fleet
from moe_engine.tuning.simulator.workload import Arrival

WAYS: dict[str, dict[str, Any]] = {"recompute": {"session_hold": 0.0}, "hold": {}}


class Closed:
    """`count` sessions at once, which start during `warm` seconds; a new session replaces an ended one. After `end` no
    request is sent. Implements `Workload`.

    The first `num_fit` sessions start at a random turn, so that their ages are mixed. Any other session that did so
    would compute a history that no server ever had: work that exists only at the beginning.

    `returning`: by time of arrival, True if the previous turn was computed here.
    """

    total = 0

    def __init__(self, shape: AgentShape, count: int, num_fit: int, warm: float, end: float, seed: int) -> None:
        self._num_fit = num_fit
        self._shape, self._count, self._end, self._rng = shape, count, end, random.Random(seed)
        self._starts = sorted(self._rng.uniform(0, warm) for _ in range(count))
        self._sessions = Agents(shape, itertools.repeat(0.0), 1 << 20, seed)
        self._new = self._sessions.first()
        self.returning: dict[float, bool] = {}

    def first(self) -> Iterator[Arrival]:
        for number, start in enumerate(self._starts):
            arrival = next(self._new)
            skipped = self._rng.randrange(self._shape.turns) if number < self._num_fit else 0
            for _ in range(skipped):
                following = self._sessions.after(arrival, 0.0)
                assert following is not None
                arrival = following
            yield self._seen(arrival, start, False)

    def after(self, arrival: Arrival, finished: float) -> Arrival | None:
        if finished > self._end:
            return None
        following = self._sessions.after(arrival, finished)
        if following is None:
            return self._seen(next(self._new), finished, False)
        return self._seen(following, following.seconds, True)

    def _seen(self, arrival: Arrival, seconds: float, returning: bool) -> Arrival:
        arrival.seconds = seconds
        self.total += 1
        self.returning[seconds] = returning
        return arrival


def point(way: str, load: float, seed: int, args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """One variant at one load, with one seed."""
    own = simulate.own_parser().parse_args(["--hardware", args.hardware])
    flags: dict[str, Any] = {"model_path": str(model), "tp_size": args.tp_size, "ep_size": args.tp_size, **WAYS[way]}
    if args.max_total_tokens:
        flags["max_total_tokens"] = args.max_total_tokens
    launch = EngineArgs.from_kwargs(**flags)
    config, source = simulate.source_of(own, launch)
    spec = simulate.fleet_spec(own, config, source)
    shape = AgentShape(
        turns=args.turns, system_len=0, input_len=args.input_len, output_len=args.output_len, pause=args.pause
    )
    footprint = (args.input_len + args.output_len) * (args.turns + 1) / 2
    pool = spec.replica.scheduler.num_slots
    count = max(1, round(load * pool / footprint))
    end = args.warm + args.seconds
    workload = Closed(shape, count, round(pool / footprint), args.warm / 2, end, seed)
    began = time.perf_counter()
    answers = Fleet(spec, workload, answer_seconds=source.answer_seconds, seed=seed).run().recorder.answers
    if wrong := next((answer.error for answer in answers if not answer.success), ""):
        raise SystemExit(f"a request failed: {wrong}")
    ended = [answer for answer in answers if args.warm < answer.started + answer.latency <= end]
    first: dict[bool, list[float]] = {False: [], True: []}
    for answer in ended:
        first[workload.returning[answer.started]].append(answer.ttft)
    return {
        "way": way,
        "load": load,
        "seed": seed,
        "pool": pool,
        "sessions": count,
        "tokens_per_second": sum(answer.output_len for answer in ended) / args.seconds,
        "turns": len(ended),
        "ttft_first": summary(first[False]),
        "ttft_returning": summary(first[True]),
        "gaps": None,
        "cached_share": sum(a.cached_tokens for a in ended) / max(sum(a.prompt_len for a in ended), 1),
        "wall_seconds": time.perf_counter() - began,
    }


def measure(cases: list[tuple[int, float, str]], args: argparse.Namespace, model: Path) -> list[dict[str, Any]]:
    """The points of all cases (seed, load, variant) in their order; prints each as soon as it has ended."""
    ended = itertools.count(1)

    def show(point: dict[str, Any]) -> None:
        print(
            f"{next(ended)} of {len(cases)}: {point['way']}, load {point['load']:g}, seed {point['seed']}: "
            f"{point['tokens_per_second']:.0f} tokens/s, after {point['wall_seconds']:.0f} s",
            file=sys.stderr,
            flush=True,
        )

    if args.jobs == 1:
        points = []
        for seed, load, way in cases:
            points.append(point(way, load, seed, args, model))
            show(points[-1])
        return points
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(point, way, load, seed, args, model) for seed, load, way in cases]
        for future in as_completed(futures):
            show(future.result())
        return [future.result() for future in futures]


def mean_of(points: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean over the seeds; `least` and `most`: range of the throughput."""
    rates = [each["tokens_per_second"] for each in points]
    times = [each["ttft_returning"] for each in points if each["ttft_returning"]]
    mean = {key: sum(each[key] for each in times) / len(times) for key in ("median", "p90")} if times else None
    return points[0] | {
        "tokens_per_second": sum(rates) / len(rates),
        "least": min(rates),
        "most": max(rates),
        "ttft_returning": mean,
        "cached_share": sum(each["cached_share"] for each in points) / len(points),
    }


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = report.command_parser("multi_turn_simulated", __doc__, allow_abbrev=False)
    parser.add_argument("--hardware", default="16xH200")
    parser.add_argument("--tp-size", type=int, default=16, help="also --ep-size; one KV cache (default: 16)")
    parser.add_argument("--max-total-tokens", type=int, help="KV cache in tokens (default: that of the ledger)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="variants (default: all)")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1, 2, 4], metavar="TIMES")
    parser.add_argument("--turns", type=int, default=8, help="of a session")
    parser.add_argument("--input-len", type=int, default=4000, help="mean new tokens of a turn")
    parser.add_argument("--output-len", type=int, default=400, help="mean tokens of an answer")
    parser.add_argument("--pause", type=float, default=5.0, help="mean seconds of a pause, exponential")
    parser.add_argument("--warm", type=float, default=300.0, help="simulated seconds before the measured ones")
    parser.add_argument("--seconds", type=float, default=600.0, help="simulated seconds, measured")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="each point is the mean over these")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    report.add_result_options(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "config.json"
        model.write_text(json.dumps(config_of("v3")))
        cases = list(itertools.product(args.seeds, args.loads, args.ways))
        points = measure(cases, args, model)
    shown = [
        mean_of([p for p in points if (p["way"], p["load"]) == (way, load)])
        for way, load in dict.fromkeys((way, load) for _, load, way in cases)
    ]
    head = ["way", "load", "sessions", "tokens/s", "least", "most", "TTFT returning, s", "p90", "cached"]
    rows = [
        [
            each["way"],
            f"{each['load']:g}",
            each["sessions"],
            *(f"{each[key]:.0f}" for key in ("tokens_per_second", "least", "most")),
            *(f"{each['ttft_returning'][key]:.2f}" if each["ttft_returning"] else "-" for key in ("median", "p90")),
            f"{each['cached_share']:.2f}",
        ]
        for each in shown
    ]
    print(report.table(head, rows))
    found = verdicts(shown)
    for seed in args.seeds if len(args.seeds) > 1 else []:
        for name, value in verdicts([each for each in points if each["seed"] == seed]).items():
            if "throughput" in name:
                found[f"{name}, seed {seed}"] = value
    for name, value in found.items():
        print(f"{name}: {value:.2f}")
    if args.plot:
        title = (
            f"DeepSeek V3 on {args.hardware}, simulated: multi-turn sessions, KV cache of {points[0]['pool']} tokens"
        )
        draw(shown, args.plot, title)
    options = {name: value for name, value in vars(args).items() if name not in ("json", "plot", "no_json")}
    report.write_if_asked(args, "multi_turn_simulated", {"points": points, "verdicts": found, "options": options})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
