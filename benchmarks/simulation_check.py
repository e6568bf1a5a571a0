"""The simulator against the real server: ``python -m benchmarks.simulation_check [options]``.

For each launch: `moe-engine calibrate`, then the same loads on the real server (`benchmarks.serving`) and in
`moe-engine simulate`, at shares of the server's rate with all requests at once. Every real run is repeated; a figure is
the median of the repeats, and `noise` the largest distance of a repeat from it. `error` is the distance of the
simulated figure from the median.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report, serving
from benchmarks.server_process import ServerProcess
from moe_engine.cli.main import main as command
from moe_engine.tuning.stats import median

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


def real(port: int, load: list[str], rate: float) -> dict[str, Any]:
    flags = ["--port", str(port), "--disable-tqdm", "--flush-cache", *load, "--request-rate", str(rate)]
    return serving.run(serving.parse_arguments(flags))[0]


def simulated(flags: list[str], costs: Path, load: list[str], rate: float) -> dict[str, Any]:
    out = costs.with_name("simulated.json")
    words = ["--cost-file", str(costs), "--output-file", str(out), "--disable-tqdm", "--request-rate", str(rate)]
    with contextlib.redirect_stdout(io.StringIO()):
        code = command(["simulate", *words, *flags, *load])
    if code:
        raise SystemExit("the simulation failed")
    values: dict[str, Any] = json.loads(out.read_text())
    return values


def compared(found: list[dict[str, Any]], ours: dict[str, Any]) -> dict[str, dict[str, float]]:
    """For each figure: real, simulated, noise, error."""
    figures = {}
    for key in TARGETS:
        runs = [values[key] for values in found]
        middle = median(runs)
        scale = max(abs(middle), 1e-9)
        figures[key] = {
            "real": middle,
            "simulated": ours[key],
            "noise": max(abs(run - middle) for run in runs) / scale if any(runs) else 0.0,
            "error": abs(ours[key] - middle) / scale if middle or ours[key] else 0.0,
        }
    return figures


def check(name: str, model: list[str], args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Rows of one launch."""
    flags, costs, rows = [*model, *LAUNCHES[name]], folder / "costs.json", []
    if command(["calibrate", *flags, "--output", str(costs)]):
        raise SystemExit("the calibration failed")
    with ServerProcess(flags) as server:
        server.wait_ready()
        for load_name, shares in RUNS[name].items():
            load = [*LOADS[load_name], "--num-prompts", str(args.num_prompts)]
            real(server.port, load, float("inf"))  # a cold server is slower
            capacity = real(server.port, load, float("inf"))["request_throughput"]
            for share in shares:
                rate = round(share * capacity, 3)
                found = [real(server.port, load, rate) for _ in range(args.repeats)]
                figures = compared(found, simulated(flags, costs, load, rate))
                rows.append({"launch": name, "load": load_name, "share": share, "request_rate": rate, **figures})
                print(_line(rows[-1]), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    cells = []
    for key, target in TARGETS.items():
        cell = row[key]
        mark = "" if cell["error"] <= target else "!" if cell["error"] > cell["noise"] else "~"
        cells.append(f"{key} {cell['real']:.4g}/{cell['simulated']:.4g}{mark}")
    return f"{row['launch']:10} {row['load']:7} {row['share']:4.0%} {row['request_rate']:8.2f}/s  " + "  ".join(cells)


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


def main() -> None:
    parser = report.command_parser("simulation_check", __doc__)
    parser.add_argument("--launches", nargs="+", choices=LAUNCHES, default=list(LAUNCHES))
    parser.add_argument("--model-path", help="default: the embedded model")
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each real run")
    report.add_result_options(parser)
    args = parser.parse_args()
    report.wait_until_quiet(args)
    model = ["--model-path", args.model_path] if args.model_path else []
    rows: list[dict[str, Any]] = []
    print("figures: real/simulated; !: misses its target by more than the noise of the real runs; ~: within that noise")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.launches:
            rows += check(name, model, args, Path(folder))
            if not args.no_json:
                result = {"rows": rows, "summary": summary(rows), "num_prompts": args.num_prompts}
                report.write_result("simulation_check", result, path=args.json)
    for key, values in summary(rows).items():
        print(
            f"{key:20} within {values['target']:.0%}: {values['within_target']} of {values['runs']}, or within the "
            f"noise: {values['within_noise']}; median error {values['median_error']:.1%}, "
            f"median noise {values['median_noise']:.1%}"
        )


if __name__ == "__main__":
    main()
