"""Metadata of benchmark results (machine, versions, date) and their output files.

No command: the benchmarks call `write_result`, which writes
``benchmarks/results/<date>_<device>_<name>.json``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from moe_engine.cli.output_file import writing
from moe_engine.config.flags import Parser
from moe_engine.config.help import Formatter
from moe_engine.errors import ConfigError

QUIET_LOAD = 0.5
"""Above this 1-minute load other programs are running, and times are unreliable."""
QUIET_WAIT_S = 300
"""Timeout of the wait for a quiet machine; a preceding benchmark's load decays within two minutes."""
_load_at_start = round(os.getloadavg()[0], 2)
RESULTS = Path(__file__).parent / "results"
ENGINE_FLAGS = "Further options are flags of the engine: `moe-engine serve --help`."
PACKAGES = ("torch", "triton", "transformers", "moe-engine", "numpy", "httpx", "tokenizers", "safetensors")


def cpu_name() -> str:
    """The processor's name from the operating system."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """The instruction sets that determine a bf16 model's speed."""
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve")
    try:
        match = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    present = set(match.group(1).split()) if match else set()
    return [name for name in wanted if name in present]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of this checkout, with ``+`` if files differ from it; None outside a repository."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        if head.returncode:
            return None
        state = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    return head.stdout.strip() + ("+" if state.stdout.strip() else "")


def machine(device: str = "cpu") -> dict[str, Any]:
    """The machine a result was measured on. `load_1min_at_start` above `QUIET_LOAD`: other programs were running."""
    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "cpu_features": cpu_features(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "load_1min_at_start": _load_at_start,
        "device": device_name(device),
    }
    if "torch" in sys.modules:
        facts["torch_threads"] = sys.modules["torch"].get_num_threads()
    return facts


def device_name(device: str) -> str:
    """``cpu``, or the accelerator's name."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name()
    return "cpu"


def result_path(name: str, device: str, folder: Path = RESULTS) -> Path:
    """``<folder>/<date>_<device>_<name>.json``."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", device_name(device)).strip("-").lower()
    return folder / f"{time.strftime('%Y-%m-%d')}_{slug}_{name}.json"


def write_result(
    name: str, values: dict[str, Any], *, device: str = "cpu", path: Path | None = None, folder: Path = RESULTS
) -> Path:
    """Writes the values with machine, versions, commit, date and command; returns the file. Atomic: an interruption
    leaves the old file, so long runs write repeatedly."""
    path = path or result_path(name, device, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "name": name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": " ".join([f"python -m {_module()}", *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(device),
        "versions": versions(),
    }
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps({"about": about, **values}, indent=1, default=str) + "\n")
    partial.replace(path)
    return path


def write_if_asked(args: argparse.Namespace, name: str, values: dict[str, Any], device: str = "cpu") -> None:
    """`write_result` to ``--json FILE`` or the folder of results, unless ``--no-json``; prints the file's path."""
    if not args.no_json:
        print(write_result(name, values, device=device, path=args.json), file=sys.stderr)


def _module() -> str:
    """The running program: ``benchmarks.side_by_side``, ``benchmarks.gpu_suite`` for a package, or one of the tests."""
    spec = sys.modules["__main__"].__spec__
    if spec is not None and spec.name.startswith("tests."):
        return spec.name
    program = Path(sys.argv[0])
    return f"benchmarks.{program.parent.name if program.stem == '__main__' else program.stem}"


def wait_until_quiet(args: argparse.Namespace) -> None:
    """Before a measurement with a result file: waits until no other program is running. With `--busy` or `--no-json` it
    only warns.

    Raises:
        SystemExit: the machine stays busy.
    """
    global _load_at_start
    ends = time.monotonic() + QUIET_WAIT_S
    while (load := os.getloadavg()[0]) > QUIET_LOAD:
        text = f"load {load:.1f}: other programs are running"
        if args.busy or args.no_json:
            print(f"{text}, the figures are unreliable", file=sys.stderr)
            break
        if time.monotonic() > ends:
            raise SystemExit(f"{text}; stop them, or measure anyway with --busy: the result records the load")
        print(f"{text}; waiting until it is below {QUIET_LOAD}", file=sys.stderr)
        time.sleep(10)
    _load_at_start = round(load, 2)


class _Parser(Parser):
    """Ends the program with one line on a wrong option, instead of pages of usage."""

    def error(self, message: str) -> NoReturn:
        try:
            super().error(message)
        except ConfigError as error:
            self.exit(2, f"{self.prog}: error: {error}\n")


def command_parser(name: str, doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """The parser of ``moe-engine bench NAME``; its help begins with `doc`, the benchmark's docstring."""
    program = f"moe-engine bench {name}"
    options.setdefault("usage", f"{program} [options]")
    return _Parser(program, description=doc, formatter_class=Formatter, **options)


def parse_with_engine_flags(
    parser: argparse.ArgumentParser, argv: list[str] | None
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The benchmark's own options, and the engine's flags as keywords."""
    from moe_engine.config.args import build_parser
    from moe_engine.config.flags import known_options, parse_flags

    own, rest = parser.parse_known_args(argv)
    return own, parse_flags(build_parser(), rest, known_options(parser))


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """``--json FILE``, ``--no-json`` and ``--busy``, for benchmarks that write their result by default."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--json", type=Path, metavar="FILE", help="output file (default: benchmarks/results)")
    group.add_argument("--no-json", action="store_true", help="print it only")
    parser.add_argument("--busy", action="store_true", help="measure although other programs are running")


def append_jsonl(flag: str, path: str | Path, values: dict[str, Any]) -> None:
    """Raises ConfigError with `flag`, which named the file, if it cannot be written."""
    with writing(flag, path), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(values, default=str) + "\n")


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A plain aligned table: the first column left-aligned, the others right-aligned."""
    lines = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def render(line: Sequence[str]) -> str:
        cells = [line[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([render(lines[0]), rule, *map(render, lines[1:])])
