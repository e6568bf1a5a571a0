"""Command line of ``moe-engine compile``: fills a folder with a launch's compiled kernels, for its nodes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_engine.errors import ConfigError
from moe_engine.kernels.triton.availability import installed
from moe_engine.tuning.hardware.table import GpuFacts, find_gpu

if TYPE_CHECKING:
    from moe_engine.kernels.triton.aot import AotReport
    from moe_engine.planning.resolved_config import ResolvedConfig

EPILOG = """\
examples:
  moe-engine compile --gpu h200 --output kernels --model-path /models/DeepSeek-V3 --tp 8
  rsync -a kernels/ node7:/opt/kernels; TRITON_CACHE_DIR=/opt/kernels moe-engine serve --model-path ... --tp 8

Use the flags of `serve`: step sizes, ranks and dtypes determine the set of kernels. The folder is a Triton cache; it is
valid on machines with the same versions of this package and of Triton. Needs no GPU."""

INDEX = "moe-engine-kernels.json"
GPUS = ("b200", "h100", "h100-pcie", "h200")
"""Those of the table whose limits `kernels.triton.aot` knows."""


def main(argv: Sequence[str], prog: str) -> int:
    """Returns 0, or 1 if a kernel spills or does not fit the GPU.

    Raises:
        ConfigError: as in `serve`; or Triton is not installed.
    """
    from moe_engine.config.args import EngineArgs, build_parser
    from moe_engine.config.flags import parse_flags

    parser = build_parser(
        prog, serves=False, description="Compiles the Triton kernels of a launch for a GPU.", epilog=EPILOG,
        usage=f"{prog} --output DIR [--gpu NAME] [serve's flags]",
    )  # fmt: skip
    parser.add_argument("--output", metavar="DIR", help="output folder; existing kernels are kept")
    parser.add_argument("--gpu", choices=GPUS, help="target GPU (default: h200)")
    values = parse_flags(parser, argv)
    output, gpu = values.pop("output", None), values.pop("gpu", None) or "h200"
    if output is None:
        raise ConfigError("--output DIR is missing: the folder for the compiled kernels")
    if not installed():
        raise ConfigError("compile needs triton, which is not installed: pip install 'triton>=3.6'")
    values["device"] = "cuda"
    args = EngineArgs.from_kwargs(**values)
    return _compile(args, find_gpu(gpu), Path(output))


def _compile(args: Any, target: GpuFacts, output: Path) -> int:
    from moe_engine.planning.prepare import prepare

    config = prepare(args, target.machine())
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be created as a folder: {error.strerror}") from None
    # Refusals come first: once Triton is loaded, its binding writes pages about leaks at the end of the process.
    from moe_engine.cli.compile_kernels.absent_deep_gemm import note
    from moe_engine.cli.compile_kernels.exercise import exercise
    from moe_engine.cli.compile_kernels.other_rows import build_triton
    from moe_engine.kernels.triton.absent_device import absent_device

    choices, draft = config.kernels.model.choices, config.kernels.draft
    for choice in choices:
        print(f"{choice.family:9} {choice.row.name}: {choice.reason}", file=sys.stderr)
    began = time.perf_counter()
    theirs = [choice.family for choice in choices if choice.row.name == "deep_gemm"]
    with absent_device(target.arch, output) as compilations:
        for takes_ends in (True, False) if "experts" in theirs and target.arch < 100 else (True,):  # by its build
            drafting = None if draft is None else build_triton(draft.choices, target.capability, takes_ends)
            for size in exercise(config, build_triton(choices, target.capability, takes_ends), drafting=drafting):
                _progress(f"{len(compilations.reports)} kernels; {size.decodes} decodes, {size.prefill} prefill tokens")
    _progress("")
    reports = compilations.reports
    _write_index(output / INDEX, config, target, reports)
    seconds = time.perf_counter() - began
    print(
        f"{len(reports)} kernels for {target.name} (sm_{target.arch}) in {output}, {compilations.num_cached} of them "
        f"there already; {seconds:.0f} s\nserve with TRITON_CACHE_DIR={output.resolve()}"
    )
    if theirs:
        print(f"warning: {note(theirs)}", file=sys.stderr)
    for report in reports:
        for problem in report.problems():
            grade = "error" if problem in report.faults() else "warning"
            print(f"{grade}: {report.name}: {problem}", file=sys.stderr)
    return 1 if any(report.faults() for report in reports) else 0


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _write_index(file: Path, config: ResolvedConfig, target: GpuFacts, reports: list[AotReport]) -> None:
    """Writes the index: target, model, versions and kernels of the folder."""
    from dataclasses import asdict
    from importlib.metadata import version

    about = {
        "gpu": target.name,
        "arch": target.arch,
        "model": config.model.architecture,
        "dtype": config.dtype,
        "tp_size": config.parallel.topology.tp_size,
        "triton": version("triton"),
        "moe_engine": version("moe-engine"),
    }
    body = {"about": about, "kernels": [asdict(report) for report in reports]}
    file.write_text(json.dumps(body, indent=1) + "\n")
