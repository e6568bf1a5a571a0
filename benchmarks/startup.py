"""Start-up time: ``python -m benchmarks.startup [--runs 5] [flags of moe-engine serve]``.

Starts ``moe-engine serve`` (the embedded model unless `--model-path` is given) several times:
seconds from starting the process to its READY line, then to the first token of a request sent immediately. The
parts come from the log lines. The first run may also compile kernels that later runs load from the cache; it is shown
separately, and the median is over the other runs. Target: READY under 6 s.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import httpx

from benchmarks import report
from benchmarks.server_process import READY_LINE, ServerProcess
from moe_engine.tuning.stats import median, spread

TARGET_SECONDS = 6.0
MARKS = (
    ("flags, processes, imports", "Load weight begin"),
    ("weights, kernels, KV pool, warm-up", "max_total_num_tokens="),
    ("frontend, warm-up request", READY_LINE),
)


def start_once(flags: list[str], timeout: float) -> dict[str, Any]:
    """One start: seconds to READY, to the first token, and of the parts visible in the log."""
    with ServerProcess(flags) as server:
        ready = server.wait_ready(timeout)
        body = {"input_ids": [1, 2, 3], "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}}
        began = time.perf_counter()
        response = httpx.post(f"{server.base_url}/generate", json=body, timeout=60)
        first_token = server.seconds
        request_seconds = time.perf_counter() - began
        response.raise_for_status()
        memory = sum(server.memory().values())
        parts: dict[str, float] = {}
        before = 0.0
        for name, mark in MARKS:
            moment = server.first_line(mark)
            if moment is not None:
                parts[name] = moment - before
                before = moment
    return {
        "ready_seconds": ready,
        "first_token_seconds": first_token,
        "first_request_seconds": request_seconds,
        "parts_seconds": parts,
        "memory_bytes": memory,
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of all runs except the first (of the first, if it is the only one)."""
    settled = runs[1:] or runs
    ready = [run["ready_seconds"] for run in settled]
    names = [name for name, _ in MARKS if all(name in run["parts_seconds"] for run in settled)]
    return {
        "ready_seconds": median(ready),
        "ready_spread": spread(ready),
        "first_token_seconds": median([run["first_token_seconds"] for run in settled]),
        "first_run_ready_seconds": runs[0]["ready_seconds"],
        "parts_seconds": {name: median([run["parts_seconds"][name] for run in settled]) for name in names},
        "memory_bytes": median([run["memory_bytes"] for run in settled]),
        "target_seconds": TARGET_SECONDS,
        "passed": median(ready) < TARGET_SECONDS,
    }


def main(argv: list[str] | None = None) -> int:
    parser = report.command_parser("startup", __doc__, allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=300.0)
    report.add_result_options(parser)
    args, flags = parser.parse_known_args(argv)
    report.wait_until_quiet(args)
    runs = []
    try:
        for index in range(args.runs):
            runs.append(start_once(flags, args.timeout))
            run = runs[-1]
            print(
                f"run {index + 1}: READY {run['ready_seconds']:.2f} s, first token {run['first_token_seconds']:.2f} s"
            )
    except (RuntimeError, httpx.HTTPError) as error:
        print(f"benchmarks.startup: {error}", file=sys.stderr)
        return 1
    values = summary(runs)
    rows = [["READY", f"{values['ready_seconds']:.2f}"]]
    rows += [[f"  {name}", f"{seconds:.2f}"] for name, seconds in values["parts_seconds"].items()]
    rows += [["first token", f"{values['first_token_seconds']:.2f}"]]
    rows += [["READY, first run", f"{values['first_run_ready_seconds']:.2f}"]]
    print(report.table(["start-up (median)", "s"], rows))
    print(f"target: READY under {TARGET_SECONDS:.0f} s: {'pass' if values['passed'] else 'short'}")
    report.write_if_asked(args, "startup", {"summary": values, "runs": runs, "flags": flags})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
