"""Runs every part on this machine's GPU: compilation, parity, kernels against their floors, the engine, a profile.

    python -m benchmarks.gpu_suite [--parts parity kernels ...] [--only TEXT ...] [--seconds 590] [--output FILE]
                                   [--rerun] [--dry-run [cpu|cuda]] [--time-factor X]

Takes less than ten minutes on one H200: cases without time are left out and counted. `--parts aot parity exchange
kernels` leaves their time to the kernels. Writes benchmarks/results/<date>_<gpu>_gpu_suite.json and a picture next to
it, and prints tables; the file is updated every few seconds, so that a run that is cut leaves what it has measured. A
failed part is reported and the others continue; a kernel that crashes or hangs costs its own line.

A file that exists is continued if it has the same code, libraries and GPU: finished parts are kept, unfinished ones go
on behind their last line, and only `aot`, whose result is Triton's cache, runs always. So the same command continues a
run that was killed, and several short runs (`--parts`) make one result. `--rerun` measures finished parts again.

Exit code: 0; 1 if a part failed or a row is wrong; 2 without a CUDA device. Missed targets do not change it.
`--dry-run` runs everything in tiny sizes, on the CPU or with `--dry-run cuda` on a GPU, into a temporary folder unless
`--output` is given: its numbers are meaningless, but it detects errors before a real run. `--time-factor X` multiplies
all time limits, of the run, parts and lines, for slower GPUs and simulated ones.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_suite.parts import MISSING, NO_DEVICE, PARTS, run_apart, run_part, shares
from benchmarks.gpu_suite.setting import Setting
from benchmarks.report import command_parser, device_name, result_path, write_result
from moe_engine.planning.inputs.code_identity import code_identity

SECONDS = 590.0
MEASURED = "measured"
"""Key of a result file: what all its parts have in common."""


def main(argv: Sequence[str] | None = None) -> int:
    names = [part.name for part in PARTS]
    parser = command_parser("gpu_suite", __doc__)
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, metavar="S", help="time limit of the whole run (590)")
    parser.add_argument("--time-factor", type=float, default=1.0, metavar="X", help="multiply all time limits (1)")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--only", nargs="+", default=(), metavar="TEXT", help="cases of kernels with one in their name")
    parser.add_argument("--rerun", action="store_true", help="measure the finished parts of the file again")
    parser.add_argument("--run-part", choices=names, help="run one part in this process and write its result")
    parser.add_argument(
        "--dry-run",
        nargs="?",
        choices=("cpu", "cuda"),
        const="cpu",
        help="all parts in tiny sizes on that device (cpu)",
    )
    options = parser.parse_args(argv)
    dry, factor = options.dry_run, options.time_factor
    if not 0 < factor < math.inf:
        parser.error(f"--time-factor {factor} must be a number above 0")
    seconds = SECONDS * factor if options.seconds is None else options.seconds
    setting = Setting.of(dry, seconds, options.output, options.only)
    if options.run_part:
        return run_part(options.run_part, setting)
    if not setting.has_device():
        print(MISSING, file=sys.stderr)
        return NO_DEVICE
    output = options.output
    if output is None:
        output = Path(tempfile.mkdtemp(), "dry_run.json") if dry else result_path("gpu_suite", "cuda")
    return run_all(options.parts, seconds, output, dry, options.only, options.rerun, factor)


def run_all(
    names: Sequence[str], seconds: float, output: Path, dry: str | None = None, only: Sequence[str] = (),
    rerun: bool = False, factor: float = 1.0,
) -> int:  # fmt: skip
    """Runs the unfinished parts in order, within `seconds`; the file has the other parts that it had. factor: of the
    parts' own limits."""
    from benchmarks.gpu_suite.picture import draw
    from benchmarks.gpu_suite.texts import part_text, summary

    ends, measured = time.monotonic() + seconds, measured_on(dry)
    result, asked = earlier(output, measured), ({"only": list(only)} if only else {})
    known = {} if rerun else {name: values for name, values in result.items() if values.get("only", []) == list(only)}
    wanted = [part.with_limits(factor) for part in PARTS if part.name in names]
    parts = [part for part in wanted if not part.is_finished(known.get(part.name))]
    for part in (part for part in wanted if part not in parts):
        print(f"\n== {part.name}: kept from {output} (--rerun measures it again)", flush=True)

    def write(name: str, values: dict[str, Any]) -> None:
        result[name] = values | asked
        write_result("gpu_suite", result | {MEASURED: measured}, device=dry or "cuda", path=output)

    for place, part in enumerate(parts):
        limit, before = shares(parts[place:], ends - time.monotonic()), known.get(part.name, {})
        if limit > 5:
            values = run_apart(part, limit, dry, only, partial(write, part.name), before)
        else:
            values = before | {"failed": "no time left"}
        write(part.name, values)
        print(f"\n== {part.name} ({values.get('seconds', 0)} s)\n{part_text(part.name, values)}", flush=True)
    picture = draw(result, output.with_suffix(".png"))
    print(f"\n{summary(result)}\n\n{output}" + (f"\n{picture}" if picture else ""))
    asked_for = [result[part.name] for part in wanted]
    return 1 if any("failed" in values or values.get("wrong") for values in asked_for) else 0


def measured_on(dry: str | None) -> dict[str, Any]:
    """The code, the libraries and the device of this run."""
    own = code_identity(Path(__file__).parents[1])["moe-engine's code"]
    return code_identity() | {"benchmarks": own, "device": device_name(dry or "cuda"), "dry": dry is not None}


def earlier(output: Path, measured: dict[str, Any]) -> dict[str, Any]:
    """The parts in a result file of the same code, libraries and device."""
    try:
        saved = json.loads(output.read_text())
    except (OSError, ValueError):
        return {}
    return {part.name: saved[part.name] for part in PARTS if saved.get(MEASURED) == measured and part.name in saved}


if __name__ == "__main__":
    sys.exit(main())
