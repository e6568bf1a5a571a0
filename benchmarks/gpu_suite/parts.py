"""The parts of the suite, each run in a process of its own: a crash or a hang of one leaves the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Part:
    """`run(folder)` returns what goes into the result, and may use the folder; it gets `limit_s` seconds at most."""

    name: str
    limit_s: int
    run: Callable[[Path], dict[str, Any]]


def _aot(folder: Path) -> dict[str, Any]:
    """Compiles on all cores what the other parts would compile one by one."""
    from dataclasses import asdict

    from benchmarks import aot_table
    from moe_engine.kernels.device import probe

    capability = probe("cuda").capability
    arch = 90 if capability is None or capability < (10, 0) else 100
    results = aot_table.run([arch], "", False, len(os.sched_getaffinity(0)))
    bad = [asdict(result) for result in results if result.problems()]
    return {"num_kernels": len(results), "arch": arch, "not_fit": bad, "wrong": len(bad)}


def _parity(folder: Path) -> dict[str, Any]:
    from benchmarks.gpu_suite import cases, parity
    from benchmarks.gpu_suite.rows import Rows
    from benchmarks.kernel_cases import all_cases
    from moe_engine.kernels.device import probe

    rows = Rows(probe("cuda"))
    lines = parity.compare([*all_cases(), *cases.parity_cases()], rows)
    return {"lines": lines, "refused": rows.refused, "wrong": sum(not line["ok"] for line in lines)}


def _kernels(folder: Path) -> dict[str, Any]:
    from benchmarks.gpu_suite import cases, kernel_times
    from benchmarks.kernel_cases import all_cases

    return kernel_times.measure([*cases.timed_cases(), *all_cases()])


def _exchange(folder: Path) -> dict[str, Any]:
    from benchmarks.gpu_suite.exchange import measure

    return measure()


def _decode(folder: Path) -> dict[str, Any]:
    from benchmarks.gpu_suite.engine_points import measure_decode

    return measure_decode(folder)


def _offline(folder: Path) -> dict[str, Any]:
    from benchmarks.gpu_suite.engine_points import measure_offline

    return measure_offline(folder)


def _fp8_layers(folder: Path) -> dict[str, Any]:
    from benchmarks.gpu_suite.engine_points import measure_fp8_layers

    return measure_fp8_layers(folder)


def _profile(folder: Path) -> dict[str, Any]:
    from benchmarks.gpu_suite.profile import measure

    return measure(folder)


PARTS = (
    Part("aot", 90, _aot),
    Part("parity", 150, _parity),
    Part("exchange", 60, _exchange),
    Part("kernels", 180, _kernels),
    Part("decode", 120, _decode),
    Part("profile", 80, _profile),
    Part("fp8_layers", 100, _fp8_layers),
    Part("offline", 150, _offline),
)
"""The quickest and most telling first: what is cut off by a limit from outside is the end."""


def run_part(name: str, output: Path) -> None:
    """Runs a part in this process and writes what it returns."""
    part = next(part for part in PARTS if part.name == name)
    with tempfile.TemporaryDirectory() as folder:
        output.write_text(json.dumps(part.run(Path(folder)), default=str))


def run_apart(part: Part, seconds: float) -> dict[str, Any]:
    """Runs a part in a process of its own; ``failed`` says what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "part.json")
        command = [sys.executable, "-m", "benchmarks.gpu_suite", "--run-part", part.name, "--output", str(output)]
        began = time.perf_counter()
        limit = min(part.limit_s, seconds)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
            values = json.loads(output.read_text()) if output.exists() else {}
            if done.returncode:
                values["failed"] = f"exit code {done.returncode}: {done.stderr[-2000:]}"
        except subprocess.TimeoutExpired:
            values = {"failed": f"not done after {limit:.0f} s"}
    return values | {"seconds": round(time.perf_counter() - began, 1)}
