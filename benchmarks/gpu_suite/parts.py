"""The parts of the suite, each run in a process of its own: a crash or a hang of one leaves the others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_suite.setting import Setting


@dataclass(frozen=True)
class Part:
    """`run(folder, setting)` returns what goes into the result, and may use the folder. It gets `limit_s` seconds at
    most, and `least_s` even where others before it take all they can."""

    name: str
    least_s: int
    limit_s: int
    run: Callable[[Path, Setting], dict[str, Any]]


def _aot(folder: Path, setting: Setting) -> dict[str, Any]:
    """Compiles on all cores what the other parts would compile one by one."""
    from dataclasses import asdict

    from benchmarks import aot_table

    capability = setting.device.capability
    arch = 100 if capability is not None and capability >= (10, 0) else 90
    only = "silu" if setting.dry else ""
    results = aot_table.run([arch], only, setting.dry, len(os.sched_getaffinity(0)))
    bad = [asdict(result) for result in results if result.problems()]
    return {"num_kernels": len(results), "arch": arch, "not_fit": bad, "wrong": len(bad)}


def _parity(folder: Path, setting: Setting) -> dict[str, Any]:
    from benchmarks.gpu_suite import cases, parity
    from benchmarks.gpu_suite.rows import Rows
    from benchmarks.kernel_cases import all_cases

    rows = Rows(setting.device)
    asked = cases.tiny_cases() if setting.dry else [*cases.parity_cases(), *all_cases()]
    lines = parity.compare(asked, rows, setting.kind, lambda: setting.is_over)
    done = {line["kernel"] for line in lines}
    left_out = [case.name for case in asked if case.name not in done] if setting.is_over else []
    wrong = sum(not line["ok"] for line in lines)
    return {"lines": lines, "refused": rows.refused, "wrong": wrong, "left_out": left_out}


def _kernels(folder: Path, setting: Setting) -> dict[str, Any]:
    from benchmarks.gpu_suite import cases, kernel_times
    from benchmarks.kernel_cases import all_cases

    asked = cases.tiny_cases() if setting.dry else [*cases.timed_cases(), *all_cases()]
    return kernel_times.measure(asked, setting=setting)


def _tokens(folder: Path, setting: Setting) -> dict[str, Any]:
    from benchmarks.gpu_suite.tokens import measure

    return measure(setting)


def _exchange(folder: Path, setting: Setting) -> dict[str, Any]:
    if setting.dry:
        return {"skipped": "needs the memory of a GPU"}
    from benchmarks.gpu_suite.exchange import measure

    return measure()


def _decode(folder: Path, setting: Setting) -> dict[str, Any]:
    from benchmarks.gpu_suite.engine_points import measure_decode

    return measure_decode(folder, setting)


def _offline(folder: Path, setting: Setting) -> dict[str, Any]:
    from benchmarks.gpu_suite.engine_points import measure_offline

    return measure_offline(folder, setting)


def _fp8_layers(folder: Path, setting: Setting) -> dict[str, Any]:
    from benchmarks.gpu_suite.engine_points import measure_fp8_layers

    return measure_fp8_layers(folder, setting)


def _profile(folder: Path, setting: Setting) -> dict[str, Any]:
    from benchmarks.gpu_suite.profile import measure

    return measure(folder, setting)


PARTS = (
    Part("aot", 45, 80, _aot),
    Part("parity", 85, 140, _parity),
    Part("tokens", 40, 75, _tokens),
    Part("exchange", 20, 60, _exchange),
    Part("kernels", 90, 150, _kernels),
    Part("decode", 90, 120, _decode),
    Part("profile", 55, 80, _profile),
    Part("fp8_layers", 65, 100, _fp8_layers),
    Part("offline", 100, 150, _offline),
)
"""Correctness before times, the quickest and most telling first: what is cut off from outside is the end."""


def shares(parts: Sequence[Part], seconds: float) -> float:
    """Seconds that the first of these parts may take, so that the others have their least."""
    left = seconds - sum(part.least_s for part in parts[1:])
    return max(min(parts[0].limit_s, left), min(parts[0].least_s, seconds))


def run_part(name: str, output: Path, setting: Setting) -> None:
    """Runs a part in this process and writes what it returns."""
    part = next(part for part in PARTS if part.name == name)
    with tempfile.TemporaryDirectory() as folder:
        output.write_text(json.dumps(part.run(Path(folder), setting), default=str))


def run_apart(part: Part, seconds: float, dry: bool = False) -> dict[str, Any]:
    """Runs a part in a process of its own, and ends all that it started; ``failed`` says what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "part.json")
        command = [sys.executable, "-m", "benchmarks.gpu_suite", "--run-part", part.name, "--output", str(output)]
        command += ["--seconds", str(seconds), *(["--dry-run"] if dry else [])]
        began = time.perf_counter()
        log = Path(folder, "stderr")
        with log.open("w") as errors:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True)
            try:
                code = process.wait(seconds)
                values = json.loads(output.read_text()) if output.exists() else {}
                if code:
                    values["failed"] = f"exit code {code}: {log.read_text()[-2000:]}"
            except subprocess.TimeoutExpired:
                values = {"failed": f"not done after {seconds:.0f} s: {log.read_text()[-500:]}"}
            finally:
                _end_group(process)
    return values | {"seconds": round(time.perf_counter() - began, 1)}


def _end_group(process: subprocess.Popen[Any]) -> None:
    """The engine's processes too, which would keep the GPU's memory from the next part."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
