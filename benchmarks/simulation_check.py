"""The simulator against the real server: ``python -m benchmarks.simulation_check [options]``.

For each launch: `moe-engine calibrate`, then the same load on the real server (`benchmarks.serving`) and in
`moe-engine simulate`, at shares of the rate that the server reached with all requests at once. Ratios are simulated
over real.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report, serving
from benchmarks.server_process import ServerProcess
from moe_engine.cli.main import main as command

LAUNCHES = {
    "default": [],
    "tp2": ["--tp", "2"],
    "dp2": ["--tp", "2", "--attn-dp-size", "2"],
    "nextn": ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", "2"],
}
SHARES = (0.4, 0.7, 0.95, 1.2)
KEYS = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "median_tpot_ms")
LOADS = {
    "random": ["--dataset-name", "random", "--random-input-len", "192", "--random-output-len", "96",
               "--random-range-ratio", "0.5"],
    "shared": ["--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "4", "--gsp-prompts-per-group", "30",
               "--gsp-system-prompt-len", "256", "--gsp-question-len", "64", "--gsp-output-len", "48"],
}  # fmt: skip


def real(port: int, load: list[str], rate: float) -> dict[str, Any]:
    flags = ["--port", str(port), "--disable-tqdm", "--flush-cache", *load, "--request-rate", str(rate)]
    return asyncio.run(serving.benchmark(serving.parse_arguments(flags)))[0]


def simulated(flags: list[str], costs: Path, load: list[str], rate: float) -> dict[str, Any]:
    out = costs.with_name("simulated.json")
    words = ["--cost-file", str(costs), "--output-file", str(out), "--disable-tqdm", "--request-rate", str(rate)]
    with contextlib.redirect_stdout(io.StringIO()):
        code = command(["simulate", *words, *flags, *load])
    if code:
        raise SystemExit("the simulation failed")
    values: dict[str, Any] = json.loads(out.read_text())
    return values


def check(name: str, model: list[str], num_prompts: int, folder: Path) -> list[dict[str, Any]]:
    """Rows of one launch."""
    flags, costs, rows = [*model, *LAUNCHES[name]], folder / "costs.json", []
    if command(["calibrate", *flags, "--output", str(costs)]):
        raise SystemExit("the calibration failed")
    with ServerProcess(flags) as server:
        server.wait_ready()
        for load_name, words in LOADS.items():
            load = [*words, "--num-prompts", str(num_prompts)]
            real(server.port, load, float("inf"))  # a cold server is slower
            capacity = real(server.port, load, float("inf"))["request_throughput"]
            for share in SHARES:
                rate = round(share * capacity, 3)
                found, ours = real(server.port, load, rate), simulated(flags, costs, load, rate)
                row: dict[str, Any] = {"launch": name, "load": load_name, "share": share, "request_rate": rate}
                for key in KEYS:
                    row[key] = {"real": found[key], "simulated": ours[key], "ratio": ours[key] / max(found[key], 1e-9)}
                cached = found["total_cached_tokens"], ours["total_cached_tokens"]
                row["total_cached_tokens"] = {"real": cached[0], "simulated": cached[1]}
                rows.append(row)
                ratios = "  ".join(f"{key} {row[key]['ratio']:.2f}" for key in KEYS)
                print(f"{name:8} {load_name:7} {share:4.0%} {rate:8.2f}/s  {ratios}  cached {cached}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="moe-engine bench simulation_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--launches", nargs="+", choices=LAUNCHES, default=list(LAUNCHES))
    parser.add_argument("--model-path", help="default: the embedded model")
    parser.add_argument("--num-prompts", type=int, default=200)
    report.add_result_options(parser)
    args = parser.parse_args()
    report.wait_until_quiet(args)
    model = ["--model-path", args.model_path] if args.model_path else []
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.launches:
            rows += check(name, model, args.num_prompts, Path(folder))
            if not args.no_json:
                report.write_result("simulation_check", {"rows": rows}, path=args.json)


if __name__ == "__main__":
    main()
