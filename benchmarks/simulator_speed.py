"""Speed of ``moe-engine simulate``: ``python -m benchmarks.simulator_speed [options]``.

DeepSeek V3 with DP attention and expert parallelism over all ranks, from a bare config.json. Each case is simulated
several times, in turn with the others; the figure is the median of simulated seconds over seconds of one core, with
`--processes` over those of the core that computes longest. The speed depends on the requests: `request_ms` is that
core's time for one. `launch_seconds`, the planning of the launch, is measured by a simulation of a single request. A
day is not simulated but extrapolated, the launch counted once: `day_minutes`.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.step_costs.models import config_of
from moe_engine.cli.main import main as command
from moe_engine.tuning.stats import median

DAY = 86400.0


@dataclass(frozen=True)
class Case:
    """A load: number of ranks, requests per second, most tokens of a prompt and an answer, number of requests."""

    ranks: int
    rate: float
    prompt: int
    answer: int
    count: int
    flags: tuple[str, ...] = ()


CASES = {
    "chat": Case(64, 10, 500, 250, 3000),
    "long-answers": Case(64, 4, 500, 1000, 1000),
    "long-prompts": Case(64, 20, 2000, 300, 2000),
    "busy": Case(64, 30, 500, 500, 3000),
    "skewed": Case(64, 10, 500, 250, 3000, ("--expert-zipf", "0.5", "--ep-num-redundant-experts", "64")),
    "day-256": Case(256, 12, 500, 250, 6000),
    "day-256-busy": Case(256, 40, 500, 250, 6000),
    "busy-2": Case(64, 30, 500, 500, 16000, ("--processes", "2")),
    "long-prompts-2": Case(64, 20, 2000, 300, 12000, ("--processes", "2")),
    "day-256-busy-2": Case(256, 40, 500, 250, 24000, ("--processes", "2")),
    "ranks-1024": Case(1024, 40, 500, 250, 2000, ("--ep-num-redundant-experts", "768")),
}


def arguments(case: Case, model: Path, output: Path) -> list[str]:
    """Arguments of `moe-engine simulate`."""
    ranks = str(case.ranks)
    return [
        "simulate", "--model-path", str(model), "--hardware", f"{ranks}xH200", "--tp", ranks, "--attn-dp-size", ranks,
        "--ep-size", ranks, "--moe-a2a-backend", "auto", *case.flags, "--request-rate", str(case.rate),
        "--num-prompts", str(case.count), "--random-input-len", str(case.prompt),
        "--random-output-len", str(case.answer), "--random-range-ratio", "0.5", "--output-file", str(output),
        "--disable-tqdm",
    ]  # fmt: skip


def run(case: Case, folder: Path) -> dict[str, float]:
    """Simulated and measured seconds of one run, and of the launch alone."""
    flags = tuple(flag for flag in case.flags if flag not in ("--processes", "2"))
    alone = _simulated(replace(case, count=1, flags=flags), folder)["cpu_seconds"]
    return _simulated(case, folder) | {"launch_seconds": alone}


def _simulated(case: Case, folder: Path) -> dict[str, float]:
    output = folder / "out.json"
    gc.collect()  # the objects of the simulation before, which it must not pay for
    began = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        if command(arguments(case, folder / "config.json", output)):
            raise SystemExit(f"the simulation failed: {' '.join(arguments(case, folder / 'config.json', output))}")
    cpu = time.process_time() - began
    found: dict[str, Any] = json.loads(output.read_text())
    cpu += max(found.get("process_seconds", [0.0]))
    names = ("duration", "wall_seconds", "concurrency", "steps", "median_ttft_ms", "median_tpot_ms", "completed")
    return {name: found[name] for name in names} | {"cpu_seconds": cpu}


def summary(case: Case, runs: list[dict[str, float]]) -> dict[str, float]:
    """Medians of the runs."""
    cpu = median([run["cpu_seconds"] for run in runs])
    launch = median([run["launch_seconds"] for run in runs])
    duration = runs[0]["duration"]
    return {
        "times_real_time": duration / cpu,
        "times_real_time_least": duration / max(run["cpu_seconds"] for run in runs),
        "times_real_time_by_wall": median([run["duration"] / run["wall_seconds"] for run in runs]),
        "cpu_seconds": cpu,
        "launch_seconds": launch,
        "request_ms": 1e3 * (cpu - launch) / case.count,
        "day_minutes": (launch + (cpu - launch) * DAY / duration) / 60,
        **{
            name: value
            for name, value in runs[0].items()
            if name not in ("wall_seconds", "cpu_seconds", "launch_seconds")
        },
    }


def main() -> None:
    parser = report.command_parser("simulator_speed", __doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    report.add_result_options(parser)
    args = parser.parse_args()
    report.wait_until_quiet(args)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in args.cases}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "config.json").write_text(json.dumps(config_of("v3")))
        for _ in range(args.repeats):
            for name in args.cases:
                runs[name].append(run(CASES[name], folder))
    rows = {name: vars(CASES[name]) | summary(CASES[name], found) for name, found in runs.items()}
    header = ["case", "ranks", "requests/s", "prompt", "answer", "times real time", "ms/request", "a day, minutes"]
    lines = [
        [name, row["ranks"], row["rate"], row["prompt"], row["answer"], f"{row['times_real_time']:.0f}",
         f"{row['request_ms']:.2f}", f"{row['day_minutes']:.0f}"]
        for name, row in rows.items()
    ]  # fmt: skip
    print(report.table(header, lines))
    report.write_if_asked(args, "simulator_speed", {"rows": rows, "runs": runs})


if __name__ == "__main__":
    main()
