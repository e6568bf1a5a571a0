"""Runs every part on the GPU of this machine: compilation, parity, kernels against their floors, the engine, a profile.

    python -m benchmarks.gpu_suite [--parts parity kernels ...] [--seconds 590] [--output FILE] [--dry-run]

Takes less than ten minutes on one H200. Writes benchmarks/results/<date>_<gpu>_gpu_suite.json and a picture beside it,
after every part anew, and prints tables. A part that fails is reported and the others go on. Exit code: 0; 1 when a
part failed or a row is wrong; 2 without a CUDA device. Targets that are missed do not change it.

`--dry-run` goes through all of it on the CPU in tiny sizes, into a temporary folder unless `--output` says where: its
numbers mean nothing, but what would break before the GPU is reached breaks here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_suite.parts import PARTS, run_apart, run_part, shares
from benchmarks.gpu_suite.setting import Setting
from benchmarks.report import result_path, table, write_result


def main(argv: Sequence[str] | None = None) -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=590.0, help="for everything")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--run-part", choices=names, help="run one part in this process, write what it returns")
    parser.add_argument("--dry-run", action="store_true", help="everything in tiny sizes on the CPU")
    options = parser.parse_args(argv)
    dry = options.dry_run
    if not dry:
        import torch

        if not torch.cuda.is_available():
            print("benchmarks.gpu_suite: needs a CUDA device; torch sees none (--dry-run)", file=sys.stderr)
            return 2
    if options.run_part:
        run_part(options.run_part, options.output, Setting.of(dry, options.seconds))
        return 0
    output = options.output
    if output is None:
        output = Path(tempfile.mkdtemp(), "dry_run.json") if dry else result_path("gpu_suite", "cuda")
    return run_all(options.parts, options.seconds, output, dry)


def run_all(names: Sequence[str], seconds: float, output: Path, dry: bool = False) -> int:
    """The parts in turn, within so many seconds; the file is written after each."""
    from benchmarks.gpu_suite.picture import draw

    ends = time.monotonic() + seconds
    result: dict[str, Any] = {}
    parts = [part for part in PARTS if part.name in names]
    for place, part in enumerate(parts):
        limit = shares(parts[place:], ends - time.monotonic())
        values = run_apart(part, limit, dry) if limit > 5 else {"failed": "no time was left"}
        result[part.name] = values
        print(f"\n== {part.name} ({values.get('seconds', 0)} s)\n{part_text(part.name, values)}", flush=True)
        write_result("gpu_suite", result, device="cpu" if dry else "cuda", path=output)
    picture = draw(result, output.with_suffix(".png"))
    print(f"\n{output}" + (f"\n{picture}" if picture else ""))
    return 1 if any("failed" in values or values.get("wrong") for values in result.values()) else 0


def part_text(name: str, values: dict[str, Any]) -> str:
    """A part's result for people."""
    from benchmarks.gpu_suite import exchange, kernel_times, tokens

    if "failed" in values:
        return f"failed: {values['failed']}"
    if "skipped" in values:
        return f"skipped: {values['skipped']}"
    if name == "aot":
        return f"{values['num_kernels']} kernels compiled for sm_{values['arch']}, {values['wrong']} not fit to ship"
    if name == "kernels":
        return kernel_times.as_text(values)
    if name == "tokens":
        return tokens.as_text(values)
    if name == "exchange":
        return exchange.as_text(values)
    if name == "parity":
        cells = [(n["kernel"], n["row"], _error(n), "yes" if n["ok"] else "NO") for n in values["lines"]]
        refused = [f"{row}: {why}" for row, why in values["refused"].items()]
        if values["left_out"]:
            refused.append(f"no time was left for {len(values['left_out'])} cases, from {values['left_out'][0]} on")
        return "\n".join([table(("kernel", "row", "error", "holds"), cells), *refused])
    if name == "profile":
        classes = [(n, f"{c['us']:.0f}", f"{c['launches']:.0f}") for n, c in values["classes"].items()]
        head = f"step {values['step_us']:.0f} us, of which the device worked {values['device_us']:.0f} us"
        first = [(n["kernel"][:70], f"{n['us']:.0f}", f"{n['share']:.0%}") for n in values["next"]]
        text = head + "\n" + table(("class", "us", "launches"), classes)
        return text + "\n" + table(("next to look at", "us", "of a step"), first)
    if name == "fp8_layers":
        cells = [
            (p["batch_size"], f"{p['layer_us']:.0f}", f"{p['layer_floor_us']:.0f}", f"{p['of_floor']:.2f}")
            for p in values["points"]
        ]
        return table(("batch", "us a layer", "floor us", "of floor"), cells)
    latencies = [(p["batch_size"], p["median_decode_latency"]) for p in values.get("points", [])]
    lines = [(size, f"{seconds * 1e3:.2f}", f"{size / seconds:.0f}") for size, seconds in latencies]
    text = table(("batch", "ms a step", "tokens/s"), lines) if lines else ""
    targets = values.get("targets")
    return text + ("\n" + kernel_times.targets_text(targets) if targets else "")


def _error(line: dict[str, Any]) -> str:
    return f"{line['error']:.1e}" if "error" in line else line.get("failed") or line["not_served"]


if __name__ == "__main__":
    sys.exit(main())
