"""Runs every part on this machine's GPU: compilation, parity, kernels against their floors, the engine, a profile.

    python -m benchmarks.gpu_suite [--parts parity kernels ...] [--only TEXT ...] [--seconds 590] [--output FILE]
                                   [--dry-run [cpu|cuda]]

Takes less than ten minutes on one H200: cases without time are left out and counted. `--parts aot parity exchange
kernels` leaves their time to the kernels. Writes benchmarks/results/<date>_<gpu>_gpu_suite.json and a picture next to
it, and prints tables; the file is updated every few seconds, so that a run that is cut leaves what it has measured. A
failed part is reported and the others continue; a kernel that crashes or hangs costs its own line. A file that exists
is continued: its other parts of this commit and GPU stay, so that several short runs (`--parts`) make one result. Exit
code: 0; 1 if a part failed or a row is wrong; 2 without a CUDA device. Missed targets do not change it.
`--dry-run` runs everything in tiny sizes, on the CPU or with `--dry-run cuda` on a GPU, into a temporary folder unless
`--output` is given: its numbers are meaningless, but it detects errors before a real run.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_suite.parts import MISSING, NO_DEVICE, PARTS, run_apart, run_part, shares
from benchmarks.gpu_suite.setting import Setting
from benchmarks.report import command_parser, commit, device_name, result_path, write_result


def main(argv: Sequence[str] | None = None) -> int:
    names = [part.name for part in PARTS]
    parser = command_parser("gpu_suite", __doc__)
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=590.0, help="time limit of the whole run")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--only", nargs="+", default=(), metavar="TEXT", help="cases of kernels with one in their name")
    parser.add_argument("--run-part", choices=names, help="run one part in this process and write its result")
    parser.add_argument(
        "--dry-run",
        nargs="?",
        choices=("cpu", "cuda"),
        const="cpu",
        help="all parts in tiny sizes on that device (cpu)",
    )
    options = parser.parse_args(argv)
    dry = options.dry_run
    setting = Setting.of(dry, options.seconds, options.output, options.only)
    if options.run_part:
        return run_part(options.run_part, setting)
    if not setting.has_device():
        print(MISSING, file=sys.stderr)
        return NO_DEVICE
    output = options.output
    if output is None:
        output = Path(tempfile.mkdtemp(), "dry_run.json") if dry else result_path("gpu_suite", "cuda")
    return run_all(options.parts, options.seconds, output, dry, options.only)


def run_all(
    names: Sequence[str], seconds: float, output: Path, dry: str | None = None, only: Sequence[str] = ()
) -> int:
    """Runs the parts in order, within `seconds`; the file has the other parts that it had."""
    from benchmarks.gpu_suite.picture import draw
    from benchmarks.gpu_suite.texts import part_text, summary

    ends = time.monotonic() + seconds
    result, ran = earlier(output, dry or "cuda"), dict[str, Any]()
    parts = [part for part in PARTS if part.name in names]

    def write(name: str, values: dict[str, Any]) -> None:
        write_result("gpu_suite", result | {name: values}, device=dry or "cuda", path=output)

    for place, part in enumerate(parts):
        limit = shares(parts[place:], ends - time.monotonic())
        values = (
            run_apart(part, limit, dry, only, partial(write, part.name)) if limit > 5 else {"failed": "no time left"}
        )
        result[part.name] = ran[part.name] = values
        print(f"\n== {part.name} ({values.get('seconds', 0)} s)\n{part_text(part.name, values)}", flush=True)
        write(part.name, values)
    picture = draw(result, output.with_suffix(".png"))
    print(f"\n{summary(result)}\n\n{output}" + (f"\n{picture}" if picture else ""))
    return 1 if any("failed" in values or values.get("wrong") for values in ran.values()) else 0


def earlier(output: Path, device: str) -> dict[str, Any]:
    """The parts in a result file of this commit and device."""
    try:
        saved = json.loads(output.read_text())
    except (OSError, ValueError):
        return {}
    about = saved.pop("about")
    same = about["commit"] == commit() and about["machine"]["device"] == device_name(device)
    return {part.name: saved[part.name] for part in PARTS if same and part.name in saved}


if __name__ == "__main__":
    sys.exit(main())
