"""The parts of the suite, each run in a separate process: a crash or hang does not affect the others."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import psutil

from benchmarks.gpu_suite.attempts import DEVICE_LOST, DeviceLost
from benchmarks.gpu_suite.setting import Setting
from moe_engine.processes.child import end_with_parent

NO_DEVICE = 2
"""Exit code without a CUDA device."""
SHOWN_S = 5.0
"""Seconds between partial results of a part in the file of the result."""
MISSING = "benchmarks.gpu_suite: needs a CUDA device; torch sees none (--dry-run)"


@dataclass(frozen=True)
class Part:
    """`run(folder, setting)` returns the part's result, and may use the folder. The part gets at most `limit_s`
    seconds, and at least `least_s` even if earlier parts use all their time.

    `environment`: variables of its process, set before it initializes CUDA, which reads them then. `forks`: its process
    is forked and must not use CUDA, not even to look for devices: a forked process cannot initialize it again.
    `prepares`: it is for the parts behind it on this machine, and runs even if a result file has it. `line_s`: seconds
    of a line, its compilation included, after which its kernel hangs: the part goes on behind it.
    """

    name: str
    least_s: float
    limit_s: float
    run: Callable[[Path, Setting], dict[str, Any]]
    environment: Mapping[str, str] = field(default_factory=dict)
    forks: bool = False
    prepares: bool = False
    line_s: float = 40.0

    def with_limits(self, factor: float) -> Part:
        """All limits multiplied."""
        limits = {name: getattr(self, name) * factor for name in ("least_s", "limit_s", "line_s")}
        return replace(self, **limits)

    def is_finished(self, values: dict[str, Any] | None) -> bool:
        """Whether these values of a result file need no further run."""
        return not (self.prepares or values is None or "failed" in values or values.get("left_out"))


def _in(module: str, function: str = "measure") -> Callable[[Path, Setting], dict[str, Any]]:
    """The function of a module of the suite, which is imported when the part runs."""

    def run(folder: Path, setting: Setting) -> dict[str, Any]:
        found: dict[str, Any] = getattr(import_module(f"benchmarks.gpu_suite.{module}"), function)(folder, setting)
        return found

    return run


def _parity(folder: Path, setting: Setting) -> dict[str, Any]:
    import torch

    from benchmarks.gpu_suite import cases, parity
    from benchmarks.gpu_suite.rows import Rows

    torch.set_float32_matmul_precision("highest")  # containers set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
    rows = Rows(setting.device)
    if setting.kind == "cpu":
        rows.interpret_triton()
    return parity.compare(cases.asked(setting, cases.parity_cases), rows, setting)


def _kernels(folder: Path, setting: Setting) -> dict[str, Any]:
    from benchmarks.gpu_suite import cases, kernel_times

    return kernel_times.measure(cases.asked(setting, cases.timed_cases), setting=setting)


def _tokens(folder: Path, setting: Setting) -> dict[str, Any]:
    from benchmarks.gpu_suite.tokens import measure

    return measure(setting)


def _exchange(folder: Path, setting: Setting) -> dict[str, Any]:
    from benchmarks.gpu_suite.exchange import measure

    return measure(setting)


OWN_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Kernels that wait for each other must not share a queue."""

PARTS = (
    # compiles on all cores what the other parts would compile one by one: 1,119 kernels of 0.5 CPU seconds; their
    # launches take each process 16
    Part("aot", 90, 150, _in("compiled"), forks=True, prepares=True),
    Part("parity", 75, 200, _parity),
    Part("tokens", 40, 75, _tokens),
    Part("exchange", 20, 75, _exchange, OWN_QUEUES),
    Part("kernels", 85, 240, _kernels),
    Part("decode", 80, 120, _in("engine_points", "measure_decode")),
    Part("profile", 45, 80, _in("profile")),
    Part("fp8_layers", 60, 100, _in("engine_points", "measure_fp8_layers")),
    Part("offline", 95, 150, _in("engine_points", "measure_offline")),
)
"""Correctness before times, the fastest and most informative first: an external time limit then cuts the least
important parts."""


def shares(parts: Sequence[Part], seconds: float) -> float:
    """Seconds available to the first of these parts, if the others keep their minimum."""
    left = seconds - sum(part.least_s for part in parts[1:])
    return max(min(parts[0].limit_s, left), min(parts[0].least_s, seconds))


def run_part(name: str, setting: Setting) -> int:
    """Runs a part in this process and saves its result; returns the exit code."""
    part = next(part for part in PARTS if part.name == name)
    os.environ.update({**part.environment, **os.environ})
    if not part.forks and not setting.has_device():
        print(MISSING, file=sys.stderr)
        return NO_DEVICE
    with tempfile.TemporaryDirectory() as folder:
        try:
            setting.save(part.run(Path(folder), setting))
        except DeviceLost:
            return DEVICE_LOST
    return 0


OF_A_RUN = ("at", "failed", "left_out", "restarts", "seconds")
"""Values of a part that its next run does not continue."""
OnValues = Callable[[dict[str, Any]], None]
"""Receives the values so far of a part that is not finished."""


def run_apart(
    part: Part, seconds: float, dry: str | None = None, only: Sequence[str] = (), on_values: OnValues = lambda _: None,
    before: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:  # fmt: skip
    """Runs a part in a separate process, restarting it if it lost the device, or if it died or hangs at a case that can
    be skipped, and ends all its processes. ``failed`` has the error; partial results are kept. on_values: every few
    seconds. before: values of an earlier run, whose lines are not tried again."""
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder, "part.json"), Path(folder, "stderr")
        began, failed = time.monotonic(), None
        setting, restarts = Setting.of(dry, seconds, output, only), 0
        if before:  # the line at which a whole run was killed is not known to be at fault
            setting.save({name: value for name, value in before.items() if name not in OF_A_RUN})
        while True:
            left = max(0.0, setting.ends - time.monotonic())
            code = _run_once(part, left, setting, log, on_values)
            at = setting.saved().get("at")
            if code is not None and (code == DEVICE_LOST or (code < 0 and at)) and not setting.is_over:
                restarts += 1
                continue
            break
        if code is None:
            failed = f"not done after {seconds:.0f} s{_where(at)}: {log.read_text()[-500:]}"
        elif code:
            failed = f"exit code {code}{_where(at)}: {log.read_text()[-2000:]}"
        values = setting.saved() | ({"failed": failed} if failed else {}) | ({"restarts": restarts} if restarts else {})
    return values | {"seconds": round(time.monotonic() - began, 1)}


def _where(at: dict[str, Any] | None) -> str:
    return f", at {at['kernel']} with {at['row']}" if at else ""


def start_process(arguments: list[str], errors: IO[Any]) -> subprocess.Popen[Any]:
    """The suite in a separate process and session, which ends with this process: a run that is killed frees the GPU."""
    command = [sys.executable, "-m", "benchmarks.gpu_suite", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True, preexec_fn=end_with_parent
    )


def _run_once(part: Part, seconds: float, setting: Setting, log: Path, on_values: OnValues) -> int | None:
    """The exit code, that of a killed process if a line hangs; None after the time limit."""
    arguments, ends = ["--run-part", part.name, "--output", str(setting.output)], time.monotonic() + seconds
    arguments += ["--seconds", str(seconds), *(["--dry-run", setting.kind] if setting.dry else [])]
    arguments += ["--only", *setting.only] if setting.only else []
    shown = time.monotonic()
    with log.open("w") as errors:
        process = start_process(arguments, errors)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(max(0.0, min(1.0, ends - time.monotonic())))
                if time.monotonic() >= ends:
                    return None
                if setting.give_up(part.line_s):
                    return -signal.SIGKILL
                if time.monotonic() >= shown + SHOWN_S and (values := setting.saved()):
                    shown = time.monotonic()
                    on_values(values | {"failed": "not finished"})
        finally:
            _end_group(process)


def _end_group(process: subprocess.Popen[Any]) -> None:
    """Also ends the engine's processes, whose GPU memory the next part needs: they have separate process groups, and
    may hang instead of exiting."""
    started = []
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for child in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
