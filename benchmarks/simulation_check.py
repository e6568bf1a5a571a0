"""The simulator against the real server: ``python -m benchmarks.simulation_check [options]``.

For each launch, `moe-engine calibrate` measures a server in rounds. Between these rounds the same server answers the
loads (`benchmarks.serving`), at shares of its rate with all requests at once; then `moe-engine simulate` runs them with
the cost file. A repeat of the loads lies between two rounds, whose slowness is that of the machine at its time: the
costs of its simulation are multiplied by their mean, so that a clock which drifts counts as no error. The calibration
knows nothing else of the loads. A figure is the median of the repeats, and `noise` the largest distance of a real
repeat from it. `error` is the median difference of a repeat and its simulation.

`--explain` prints for each run the phases of its requests (client's call, frontend, queue, prefill, delivery, decode)
and its steps by kind, as the server measured them and as the simulator has them: the phase that differs is the one
whose model is wrong. The result file then has these tables and the cost files.

A table is written beside the result file. On a quiet machine of two cores the command without options takes about ten
minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks import report, serving, simulation_phases
from benchmarks.checkpoints import SHAPES, ensure_checkpoint
from moe_engine.cli import calibrate
from moe_engine.cli.main import main as command
from moe_engine.config.args import EngineArgs, build_parser
from moe_engine.config.flags import parse_flags
from moe_engine.planning.prepare import prepare
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.tuning.calibration import ROUNDS
from moe_engine.tuning.stats import mean, median

LAUNCHES: dict[str, list[str]] = {
    "default": [],
    "nextn": ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", "2", "--speculative-eagle-topk", "1",
              "--speculative-num-draft-tokens", "3"],
    "tp2": ["--tp", "2"],
    "dp2": ["--tp", "2", "--attn-dp-size", "2"],
    "small-pool": ["--max-total-tokens", "2048", "--schedule-conservativeness", "0.1"],
}  # fmt: skip
RANDOM = ["--dataset-name", "random", "--random-input-len", "128", "--random-output-len", "64"]
LOADS = {
    "random": [*RANDOM, "--random-range-ratio", "0.5"],
    "long": ["--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "384",
             "--random-range-ratio", "0.5"],
    "shared": ["--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "4", "--gsp-prompts-per-group", "25",
               "--gsp-system-prompt-len", "256", "--gsp-question-len", "64", "--gsp-output-len", "48"],
}  # fmt: skip
RUNS: dict[str, dict[str, tuple[float, ...]]] = {
    "default": {"random": (0.4, 0.7, 0.95, 1.2), "shared": (0.7, 0.95)},
    "nextn": {"random": (0.4, 0.7, 0.95)},
    "tp2": {"random": (0.4, 0.7, 0.95)},
    "dp2": {"random": (0.4, 0.7, 0.95)},
    "small-pool": {"long": (0.7, 0.95)},
}
"""Shares of the server's rate with all requests at once, by launch and load."""
EMBEDDED = "embedded"
MODELS: dict[str, tuple[tuple[str, ...], float]] = {
    EMBEDDED: (("default", "nextn", "tp2", "dp2", "small-pool"), 1.0),
    "moe-390m": (("default",), 0.4),
}
"""Launches of a model without `--launches`, and its share of `--num-prompts`."""
TARGETS = {
    "output_throughput": 0.05,
    "median_ttft_ms": 0.1,
    "p99_ttft_ms": 0.2,
    "median_itl_ms": 0.1,
    "p99_itl_ms": 0.2,
    "total_cached_tokens": 0.02,
    "retractions": 0.02,
}
"""Target: the largest error."""
LEAST_CACHED = 100
"""Fewer cached tokens are equal first tokens of random prompts: their difference is taken relative to this number."""


class Point(NamedTuple):
    """A load at a share of the server's rate with all requests at once. `load`: flags of `benchmarks.serving`."""

    name: str
    share: float
    rate: float
    load: list[str]


def real(port: int, load: list[str], rate: float, explain: bool = False) -> dict[str, Any]:
    """explain: with `phases` of the answers and `step_times` of the server."""
    url = f"http://127.0.0.1:{port}/server_info"
    before = simulation_phases.num_steps(httpx.get(url, timeout=60).json()) if explain else []
    flags = ["--port", str(port), "--disable-tqdm", "--flush-cache", *load, "--request-rate", str(rate)]
    values, answers = serving.run(serving.parse_arguments(flags))
    if not explain:
        return values
    steps = simulation_phases.step_times(httpx.get(url, timeout=60).json(), before)
    return values | {"phases": [answer.phases for answer in answers], "step_times": steps}


def simulated(
    flags: list[str], costs: Path, load: list[str], rate: float, slowness: float, details: bool = False
) -> dict[str, Any]:
    """Figures of `moe-engine simulate` with all costs multiplied by `slowness`: a load of a rate that is higher by this
    factor, whose times are multiplied by it."""
    out = costs.with_name("simulated.json")
    words = ["--cost-file", str(costs), "--output-file", str(out), "--disable-tqdm"]
    words += ["--request-rate", str(rate * slowness), *["--output-details"] * details]
    with contextlib.redirect_stdout(io.StringIO()):
        code = command(["simulate", *words, *flags, *load])
    if code:
        raise SystemExit("the simulation failed")
    values: dict[str, Any] = json.loads(out.read_text())
    values |= {key: values[key] * slowness for key in TARGETS if key.endswith("_ms")}
    values["output_throughput"] /= slowness
    if details:
        values["phases"] = [{name: t * slowness for name, t in phases.items()} for phases in values["phases"]]
        values["step_times"] = [[*step[:2], step[2] * slowness, *step[3:]] for step in values["step_times"]]
    return values


def compared(found: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each figure: real, simulated, noise, error; of real runs, each with its simulation."""
    figures = {}
    for key in TARGETS:
        runs, guesses = ([values[key] for values in side] for side in (found, ours))
        middle, difference = median(runs), median([guess - run for run, guess in zip(runs, guesses, strict=True)])
        scale = max(abs(middle), LEAST_CACHED if key == "total_cached_tokens" else 1e-9)
        figures[key] = {
            "real": middle,
            "simulated": middle + difference,
            "noise": max(abs(run - middle) for run in runs) / scale if any(runs) else 0.0,
            "error": abs(difference) / scale if difference else 0.0,
        }
    return figures


def resolved(flags: list[str]) -> ResolvedConfig:
    """The launch of these flags of `serve`."""
    return prepare(EngineArgs.from_kwargs(**parse_flags(build_parser("serve"), flags)))


@dataclass
class Turns:
    """The loads of a launch on the server of its calibration, between the rounds of this calibration.

    Args:
        num_prompts: of each load.
        repeats: of each load; the first ones follow the first round.
    """

    launch: str
    num_prompts: int
    repeats: int
    explain: bool
    points: list[Point] = field(default_factory=list)
    """Loads at the rates that follow from the server's own."""
    found: list[list[dict[str, Any]]] = field(default_factory=list)
    """Figures of each point, by repeat."""

    def run(self, port: int, number: int) -> None:
        """After the round of this number, from 0."""
        if number >= self.repeats:
            return
        if number == 0:
            self._find_rates(port)
        self.found.append([real(port, point.load, point.rate, self.explain) for point in self.points])

    def _find_rates(self, port: int) -> None:
        for name, shares in RUNS[self.launch].items():
            load = [*LOADS[name], "--num-prompts", str(self.num_prompts)]
            real(port, load, float("inf"))  # a cold server is slower
            capacity = real(port, load, float("inf"))["request_throughput"]
            self.points += [Point(name, share, round(share * capacity, 3), load) for share in shares]


def check(model: str, name: str, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Rows of one launch of a model."""
    flags = [*model_flags(model), *LAUNCHES[name]]
    turns = Turns(name, round(args.num_prompts * MODELS.get(model, ((), 1.0))[1]), args.repeats, args.explain)
    costs = calibrate.measure(flags, resolved(flags), turns.run)
    path = folder / "costs.json"
    path.write_text(costs.to_json(), encoding="utf-8")
    rounds = [values["slowness"] for values in costs.conditions["rounds"]]
    slowness = [mean(pair) for pair in pairwise(rounds)][: args.repeats]
    rows = []
    for place, point in enumerate(turns.points):
        runs = [values[place] for values in turns.found]
        ours = [simulated(flags, path, point.load, point.rate, factor, args.explain) for factor in slowness]
        about = {"model": model, "launch": name, "load": point.name, "share": point.share, "request_rate": point.rate}
        rows.append(about | {"slowness": slowness} | compared(runs, ours))
        print(_line(rows[-1]), flush=True)
        if args.explain:
            rows[-1] |= {"explained": _explanation(runs, ours), "costs": _measured(path)}
            print(rows[-1]["explained"], flush=True)
    return rows


def _measured(costs: Path) -> dict[str, Any]:
    """A cost file without what depends on this machine's folders."""
    values: dict[str, Any] = json.loads(costs.read_text())
    return {name: value for name, value in values.items() if name not in ("launch", "machine", "ledger")}


def _explanation(found: list[dict[str, Any]], ours: list[dict[str, Any]]) -> str:
    phases = [[phases for values in side for phases in values["phases"]] for side in (found, ours)]
    steps = [[step for values in side for step in values["step_times"]] for side in (found, ours)]
    return f"{simulation_phases.phase_table(*phases)}\n{simulation_phases.step_table(*steps)}\n"


def model_flags(model: str) -> list[str]:
    """Flags of `serve` for the embedded model, a shape of `benchmarks.checkpoints`, or a folder."""
    if model == EMBEDDED:
        return []
    return ["--model-path", str(ensure_checkpoint(model) if model in SHAPES else model)]


def _line(row: dict[str, Any]) -> str:
    cells = []
    for key, target in TARGETS.items():
        cell = row[key]
        mark = "" if cell["error"] <= target else "!" if cell["error"] > cell["noise"] else "~"
        cells.append(f"{key} {cell['real']:.4g}/{cell['simulated']:.4g}{mark}")
    return (
        f"{row['model']:9} {row['launch']:10} {row['load']:7} {row['share']:4.0%} {row['request_rate']:8.2f}/s  "
        + "  ".join(cells)
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each figure: runs within the target, and within the target or the noise of the real runs; median error."""
    found = {}
    for key, target in TARGETS.items():
        errors = [row[key]["error"] for row in rows]
        found[key] = {
            "target": target,
            "runs": len(rows),
            "within_target": sum(error <= target for error in errors),
            "within_noise": sum(row[key]["error"] <= max(target, row[key]["noise"]) for row in rows),
            "median_error": median(errors),
            "median_noise": median([row[key]["noise"] for row in rows]),
        }
    return found


def as_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: real and simulated figures; bold where the error exceeds its target, in brackets if within the noise
    of the real runs."""
    keys = list(TARGETS)
    lines = [
        "| model | launch | load | share | " + " | ".join(f"{key} ({TARGETS[key]:.0%})" for key in keys) + " |",
        "|---" * (4 + len(keys)) + "|",
    ]
    for row in rows:
        cells = [f"{row[key]['real']:.4g}, {_marked(row[key], TARGETS[key])}" for key in keys]
        lines.append(f"| {row['model']} | {row['launch']} | {row['load']} | {row['share']:.0%} | {' | '.join(cells)} |")
    whole = summary(rows)
    for words, key in (("within the target", "within_target"), ("or the noise", "within_noise")):
        counts = [f"{whole[name][key]} of {len(rows)}" for name in keys]
        lines.append(f"| {words} | | | | {' | '.join(counts)} |")
    lines.append("| median error | | | | " + " | ".join(f"{whole[key]['median_error']:.1%}" for key in keys) + " |")
    return "\n".join(lines)


def _marked(cell: dict[str, float], target: float) -> str:
    text = f"{cell['simulated']:.4g}"
    if cell["error"] <= target:
        return text
    return f"({text})" if cell["error"] <= cell["noise"] else f"**{text}**"


def main() -> None:
    parser = report.command_parser("simulation_check", __doc__)
    parser.add_argument("--launches", nargs="+", choices=LAUNCHES, help="default: all of the embedded model")
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), help="embedded, shapes of `benchmarks.checkpoints`, or folders"
    )
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--repeats", type=int, choices=range(1, ROUNDS), default=ROUNDS - 1, help="of each real run")
    parser.add_argument(
        "--explain", action="store_true", help="for each run, phases of requests and steps, real and simulated"
    )
    report.add_result_options(parser)
    args = parser.parse_args()
    report.wait_until_quiet(args)
    rows: list[dict[str, Any]] = []
    print("figures: real/simulated; !: misses its target by more than the noise of the real runs; ~: within that noise")
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            for name in args.launches or MODELS.get(model, MODELS[EMBEDDED])[0]:
                rows += check(model, name, args, Path(folder))
                if not args.no_json:
                    result = {"rows": rows, "summary": summary(rows), "num_prompts": args.num_prompts}
                    path = report.write_result("simulation_check", result, path=args.json)
                    path.with_suffix(".md").write_text(as_table(rows) + "\n", encoding="utf-8")
    for key, values in summary(rows).items():
        print(
            f"{key:20} within {values['target']:.0%}: {values['within_target']} of {values['runs']}, or within the "
            f"noise: {values['within_noise']}; median error {values['median_error']:.1%}, "
            f"median noise {values['median_noise']:.1%}"
        )


if __name__ == "__main__":
    main()
