"""``moe-engine bench``: runs a benchmark of the source checkout."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_engine.cli import USAGE_ERROR
from moe_engine.errors import ConfigError, did_you_mean

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("agreeing_checkpoint", "checkpoints", "gguf_export", "readme_figures")
"""Scripts of benchmarks/ that prepare or check data and measure nothing."""
OTHER_NAMES = {"latency": "one_batch", "throughput": "offline_throughput", "serve": "serving"}
"""vLLM's names."""
HELP = """\
usage: %s NAME [options of the benchmark]

Runs a benchmark of the source checkout; `moe-engine bench NAME --help` explains its options.

examples:
  moe-engine bench serving --dataset-name random --num-prompts 100    a running server on port 30000
  moe-engine bench one_batch --batch-size 8 --input-len 128           one static batch, without a server
  moe-engine bench gpu_suite                                          every check and measurement on a GPU

benchmarks:
%s"""


def main(argv: Sequence[str], prog: str) -> int:
    """Runs benchmarks/NAME.py, or the package benchmarks/NAME, of the source checkout with the remaining arguments."""
    found = benchmarks()
    if not argv or argv[0] in ("-h", "--help"):
        listed = "\n".join(f"  {name:20} {what}" for name, what in found.items() if name not in TOOLS)
        listed = listed or "  none: benchmarks/ is only in the source checkout"
        print(HELP % (prog, listed))
        return 0 if argv else USAGE_ERROR
    name = _benchmark(argv[0], list(found))
    sys.argv = [f"{prog} {name}", *argv[1:]]
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    try:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "moe_engine", "benchmarks", "tests"):
            raise
        raise ConfigError(f"{name}: needs {package}, which is not installed: pip install {package}") from None
    return 0


def benchmarks() -> dict[str, str]:
    """Runnable modules and packages of benchmarks/, with the first line of their docstrings."""
    folder = ROOT / "benchmarks"
    runnable = {file.stem: file for file in folder.glob("*.py") if '__name__ == "__main__"' in file.read_text()}
    runnable |= {file.parent.name: file.with_name("__init__.py") for file in folder.glob("*/__main__.py")}
    first_lines = {
        name: (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
        for name, file in sorted(runnable.items())
    }
    return {
        name: re.split("[:,] ``python", line)[0].rstrip(":.").replace("``", "`") for name, line in first_lines.items()
    }


def _benchmark(asked: str, names: list[str]) -> str:
    """The benchmark of that name, or the only one with that prefix."""
    wanted = asked.replace("-", "_").removeprefix("bench_")
    wanted = OTHER_NAMES.get(wanted, wanted)
    matching = [name for name in names if name == wanted] or [name for name in names if name.startswith(wanted)]
    if len(matching) == 1:
        return matching[0]
    if not names:
        raise ConfigError(f"{asked}: benchmarks are not installed with the package; run it in a source checkout")
    if matching:
        raise ConfigError(f"{asked}: begins several names, {', '.join(matching)}; give one of them")
    raise ConfigError(f"{asked}: no such benchmark{did_you_mean(wanted, names)}; `moe-engine bench` lists them")
