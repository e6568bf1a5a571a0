"""The simulator against the real server: ``python -m benchmarks.simulation_check [options]``.

For each launch: `moe-engine calibrate`, then the same loads on the real server (`benchmarks.serving`) and in
`moe-engine simulate`, at shares of the server's rate with all requests at once. Every real run is repeated, the loads
in turn; a figure is the median of the repeats, and `noise` the largest distance of a repeat from it. `error` is the
distance of the simulated figure from the median. With `--calibrations 2` a second calibration follows the real runs,
and the simulated figure is the mean with both cost files: a machine that drifts counts with its mean.

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
from pathlib import Path
from typing import Any

import httpx

from benchmarks import report, serving, simulation_phases
from benchmarks.checkpoints import SHAPES, ensure_checkpoint
from benchmarks.server_process import ServerProcess
from moe_engine.cli.main import main as command
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


def simulated(flags: list[str], costs: Path, load: list[str], rate: float, details: bool = False) -> dict[str, Any]:
    out = costs.with_name("simulated.json")
    words = ["--cost-file", str(costs), "--output-file", str(out), "--disable-tqdm", "--request-rate", str(rate)]
    words += ["--output-details"] * details
    with contextlib.redirect_stdout(io.StringIO()):
        code = command(["simulate", *words, *flags, *load])
    if code:
        raise SystemExit("the simulation failed")
    values: dict[str, Any] = json.loads(out.read_text())
    return values


def compared(found: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each figure: real, simulated, noise, error."""
    figures = {}
    for key in TARGETS:
        runs = [values[key] for values in found]
        middle, guess = median(runs), mean([values[key] for values in ours])
        scale = max(abs(middle), LEAST_CACHED if key == "total_cached_tokens" else 1e-9)
        figures[key] = {
            "real": middle,
            "simulated": guess,
            "noise": max(abs(run - middle) for run in runs) / scale if any(runs) else 0.0,
            "error": abs(guess - middle) / scale if middle or guess else 0.0,
        }
    return figures


def calibrated(flags: list[str], path: Path) -> Path:
    if command(["calibrate", *flags, "--output", str(path)]):
        raise SystemExit("the calibration failed")
    return path


def check(model: str, name: str, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Rows of one launch of a model."""
    num_prompts = round(args.num_prompts * MODELS.get(model, ((), 1.0))[1])
    flags = [*model_flags(model), *LAUNCHES[name]]
    costs = [calibrated(flags, folder / "before.json")]
    points: list[tuple[str, float, float, list[str]]] = []
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    with ServerProcess([*flags, *["--record-step-times"] * args.explain]) as server:
        server.wait_ready()
        for load_name, shares in RUNS[name].items():
            load = [*LOADS[load_name], "--num-prompts", str(num_prompts)]
            real(server.port, load, float("inf"))  # a cold server is slower
            capacity = real(server.port, load, float("inf"))["request_throughput"]
            points += [(load_name, share, round(share * capacity, 3), load) for share in shares]
        for _ in range(args.repeats):
            for load_name, share, rate, load in points:
                run = real(server.port, load, rate, args.explain)
                found.setdefault((load_name, share), []).append(run)
    if args.calibrations > 1:
        costs.append(calibrated(flags, folder / "after.json"))
    rows = []
    for load_name, share, rate, load in points:
        runs = found[load_name, share]
        ours = [simulated(flags, path, load, rate, args.explain) for path in costs]
        figures = compared(runs, ours)
        about = {"model": model, "launch": name, "load": load_name, "share": share, "request_rate": rate}
        rows.append(about | figures)
        print(_line(rows[-1]), flush=True)
        if args.explain:
            rows[-1] |= {"explained": _explanation(runs, ours), "costs": [_measured(path) for path in costs]}
            print(rows[-1]["explained"], flush=True)
    return rows


def _measured(costs: Path) -> dict[str, Any]:
    """A cost file without what depends on this machine's folders."""
    values: dict[str, Any] = json.loads(costs.read_text())
    return {name: value for name, value in values.items() if name not in ("launch", "machine", "ledger")}


def _explanation(found: list[dict[str, Any]], ours: list[dict[str, Any]]) -> str:
    phases = [[phases for values in side for phases in values["phases"]] for side in (found, ours)]
    # mean numbers of steps: as many repeats of one side as of the other
    steps = [
        [step for _ in range(len(other)) for values in side for step in values["step_times"]]
        for side, other in ((found, ours), (ours, found))
    ]
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
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each real run")
    parser.add_argument("--calibrations", type=int, choices=(1, 2), default=1, help="2: also after the real runs")
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
