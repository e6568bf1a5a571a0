"""The autopilot on a real server, from bad settings: ``python -m benchmarks.autopilot_server [options]``.

For each bad start one server without and one with `--autopilot`, and one server with the settings of its flags. The
same clients send requests in a closed loop; requests that end after `--settle` seconds are counted.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from typing import Any

from benchmarks import report, serving
from benchmarks.server_process import ServerProcess

RANDOM = ["--dataset-name", "random", "--random-input-len", "128", "--random-output-len", "32", "--random-range-ratio",
          "0.5"]  # fmt: skip
SHARED = ["--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "16", "--gsp-prompts-per-group", "64",
          "--gsp-system-prompt-len", "512", "--gsp-question-len", "32", "--gsp-output-len", "16"]  # fmt: skip
STARTS: dict[str, tuple[list[str], dict[str, Any], list[str]]] = {
    "launch": ([], {}, RANDOM),
    "few rows": ([], {"max_running_requests": 2}, RANDOM),
    "small chunks": ([], {"chunked_prefill_size": 16}, RANDOM),
    "shared prefixes, fcfs": (["--max-total-tokens", "4096"], {}, SHARED),
}
"""Flags, changes by `/set_internal_state`, and the load."""


def set_settings(base_url: str, changes: dict[str, Any]) -> None:
    body = json.dumps({"server_args": changes}).encode()
    request = urllib.request.Request(f"{base_url}/set_internal_state", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()


def measure(start: str, autopilot: bool, args: argparse.Namespace) -> dict[str, Any]:
    flags, changes, load = STARTS[start]
    model = ["--model-path", args.model_path] if args.model_path else []
    with ServerProcess([*model, *flags, *(["--autopilot"] if autopilot else [])]) as server:
        server.wait_ready()
        if changes:
            set_settings(server.base_url, changes)
        load = ["--port", str(server.port), "--disable-tqdm", *load, "--max-concurrency", str(args.clients)]
        settling = serving.run(serving.parse_arguments([*load, "--num-prompts", str(args.settle_prompts)]))[0]
        found = serving.run(serving.parse_arguments([*load, "--seed", "2", "--num-prompts", str(args.num_prompts)]))[0]
        lines = [line.split("Autopilot: ", 1)[1] for _, line in server.lines if "Autopilot: " in line]
    row = {
        "start": start,
        "autopilot": autopilot,
        "settle_seconds": settling["duration"],
        "total_throughput": found["total_throughput"],
        "median_ttft_ms": found["median_ttft_ms"],
        "median_itl_ms": found["median_itl_ms"],
        "changes": lines,
    }
    print(
        f"{start:26} {'autopilot' if autopilot else 'fixed':10} {row['total_throughput']:9.1f} token/s, median TTFT "
        f"{row['median_ttft_ms']:8.1f} ms, ITL {row['median_itl_ms']:6.1f} ms; settled {row['settle_seconds']:.0f} s",
        flush=True,
    )
    for line in lines:
        print(f"    {line}", flush=True)
    return row


def main() -> None:
    parser = report.command_parser("autopilot_server", __doc__)
    parser.add_argument("--model-path", help="default: the embedded model")
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS))
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--settle-prompts", type=int, default=200)
    parser.add_argument("--num-prompts", type=int, default=200)
    report.add_result_options(parser)
    args = parser.parse_args()
    report.wait_until_quiet(args)
    rows = []
    for start in args.starts:
        rows += [measure(start, autopilot, args) for autopilot in (False, True)]
    report.write_if_asked(args, "autopilot_server", {"rows": rows})


if __name__ == "__main__":
    main()
