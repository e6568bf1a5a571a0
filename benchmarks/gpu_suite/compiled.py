"""Every kernel of the named shapes compiled on all cores, into the cache that the other parts find it in: one by one,
as they are launched, they would take minutes."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import asdict
from typing import Any

from benchmarks import aot_table
from benchmarks.gpu_suite.setting import Setting


def measure(setting: Setting) -> dict[str, Any]:
    """How many were compiled for this GPU, and those that spill, do not fit or did not compile; `left_out` counts those
    for which no time was left."""
    arch = _arch(setting)
    jobs = aot_table.jobs([arch], "silu" if setting.dry else "", setting.dry)
    values: dict[str, Any] = {"arch": arch, "num_kernels": 0, "not_fit": [], "wrong": 0, "left_out": len(jobs)}
    for number, result in enumerate(aot_table.compiled(jobs, len(os.sched_getaffinity(0))), 1):
        values |= {"num_kernels": number, "left_out": len(jobs) - number}
        if result.problems():
            values["not_fit"].append(asdict(result))
            values["wrong"] += 1
        if number % 16 == 0:
            setting.save(values)
        if setting.is_over:
            break
    return values


def _arch(setting: Setting) -> int:
    """90 or 100, asked for in a process of its own: the compilers are forked, which a process that uses a GPU cannot
    be."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        capability = pool.apply(_capability, (setting,))
    return 100 if capability is not None and capability >= (10, 0) else 90


def _capability(setting: Setting) -> tuple[int, int] | None:
    return setting.device.capability
