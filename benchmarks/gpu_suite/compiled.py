"""Compiles all kernels of the suite in advance on all cores, into the caches of the other parts: compilation one by
one at launch would take minutes of these parts. Also the C++ kernels of the CPU, whose tokens the GPU's are compared
with.

Every process makes all launches on an absent device, and compiles its share of the requested kernels.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
import zlib
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_suite.setting import RESERVE, Setting
from moe_engine.planning.inputs.machine import Machine, probe_machine

Found = tuple[list[dict[str, Any]], list[str], int]
"""Compiler reports, failed launches, and the number of kernels skipped for lack of time."""


def measure(folder: Path, setting: Setting) -> dict[str, Any]:
    """The number of kernels for this GPU, kernels that spill or do not fit, and launches that did not compile."""
    from triton import knobs

    machine, count = _machine(setting), len(os.sched_getaffinity(0))
    if knobs.runtime.interpret:
        return {"skipped": "kernels are interpreted on this machine"}
    reports: list[dict[str, Any]] = []
    failures: set[str] = set()
    values: dict[str, Any] = {"arch": _arch(machine), "num_kernels": 0, "left_out": 0}
    cpu_kernels = subprocess.Popen([sys.executable, "-m", "moe_engine.kernels.cpu"], stdout=subprocess.DEVNULL)
    with multiprocessing.get_context("fork").Pool(count) as pool:
        share = partial(_share, count=count, folder=folder, machine=machine, setting=setting)
        for found, failed, left_out in pool.imap_unordered(share, range(count)):
            reports += found
            failures.update(failed)
            not_fit = [report for report in reports if report["problems"]]
            values |= {
                "num_kernels": len(reports), "cached": sum(not report["seconds"] for report in reports),
                "not_fit": not_fit, "failures": sorted(failures), "wrong": len(not_fit) + len(failures),
                "left_out": values["left_out"] + left_out,
            }  # fmt: skip
            setting.save(values)
    with contextlib.suppress(subprocess.TimeoutExpired):  # else the part that needs them waits or compiles
        cpu_kernels.wait(max(0.0, setting.ends - RESERVE - time.monotonic()))
    return values


def _share(number: int, count: int, folder: Path, machine: Machine, setting: Setting) -> Found:
    from triton import knobs

    from benchmarks.gpu_suite.launches import of_suite
    from moe_engine.kernels.triton.absent_device import absent_device

    left_out: set[str] = set()
    failures = []

    def is_other_share(*, key: Any, fn: Any, **rest: Any) -> bool:
        name = f"{fn.name} {key}"
        if zlib.crc32(name.encode()) % count != number:
            return True
        if setting.is_over:
            left_out.add(name)
        return name in left_out

    own = folder / str(number)
    with absent_device(_arch(machine)) as compilations:
        before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, is_other_share
        try:
            for name, launch in of_suite(own, machine, setting):
                try:
                    launch()
                except Exception as error:
                    failures.append(f"{name}: {type(error).__name__}: {error}")
        finally:
            knobs.runtime.jit_cache_hook = before
    reports = [asdict(report) | {"problems": report.problems()} for report in compilations.reports]
    return reports, failures, len(left_out)


def _machine(setting: Setting) -> Machine:
    """Probed in a separate process: the compilers are forked, which is not possible after using a GPU."""
    if setting.kind == "cpu":
        from moe_engine.tuning.hardware.table import find_gpu

        return find_gpu("h200").machine()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(probe_machine, (setting.kind,))


def _arch(machine: Machine) -> int:
    """Triton's number of the architecture, if the tables have kernels for it."""
    return 100 if machine.device.capability is not None and machine.device.capability >= (10, 0) else 90
