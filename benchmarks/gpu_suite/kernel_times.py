"""Times of every row for every named shape, against the floors of this GPU, against vendors, against targets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_suite.attempts import Attempts
from benchmarks.gpu_suite.clock import Clock, Limits
from benchmarks.gpu_suite.rows import Rows
from benchmarks.gpu_suite.setting import Setting
from benchmarks.gpu_suite.targets import check_all
from benchmarks.kernel_cases import KernelCase, NotServed
from benchmarks.report import table


def measure(
    cases: Iterable[KernelCase], rows: Sequence[str] | None = None, setting: Setting | None = None
) -> dict[str, Any]:
    """Limits of this GPU, a line per case and row, cases skipped for lack of time, unavailable rows, and the targets.

    Raises:
        DeviceLost: see `attempts`.
    """
    setting = setting or Setting.of(None, math.inf)
    clock = Clock(setting.kind, setting.dry)
    limits = clock.limits()
    able = Rows(setting.device, rows)

    def values(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
        targets = check_all(lines, limits.copy_bytes_per_s)
        return {"limits": asdict(limits), "lines": lines, "refused": able.refused, "targets": targets}

    attempts, left_out = Attempts(setting, values), []
    for case in cases:
        if setting.is_over:
            left_out.append(case.name)
            continue
        for name, kernel in attempts.rows(case, able.kernels[case.family]).items():
            attempts.run(case, name, partial(time_row, case, kernel, clock, limits, setting))
    return values(attempts.lines) | {"left_out": left_out}


def time_row(case: KernelCase, kernel: Any, clock: Clock, limits: Limits, setting: Setting) -> dict[str, Any]:
    """Time of a case with a row, or the refusal reason, or the failure."""
    peak = limits.fp8_flops_per_s if case.fp8 and limits.fp8_flops_per_s else limits.bf16_flops_per_s
    line: dict[str, Any] = {}
    try:
        floor = case.floor_seconds(limits.copy_bytes_per_s, peak)
        line["floor_us"] = floor * 1e6
        torch.manual_seed(0)
        seconds = clock.seconds(case.prepare(kernel, setting.kind))
    except NotServed as why:
        return line | {"not_served": str(why)}
    except Exception as error:
        return line | {"failed": f"{type(error).__name__}: {error}"}
    finally:
        if setting.kind == "cuda" and setting.device_works():
            torch.cuda.empty_cache()
    return line | {
        "us": seconds * 1e6, "of_floor": floor / seconds, "bytes_per_s": case.bytes / seconds,
        "flops_per_s": case.flops / seconds,
    }  # fmt: skip


def as_text(values: dict[str, Any]) -> str:
    """The lines and targets as tables."""
    limits = values["limits"]
    fp8 = limits["fp8_flops_per_s"]
    head = f"copy {limits['copy_bytes_per_s'] / 1e9:.0f} GB/s, bf16 {limits['bf16_flops_per_s'] / 1e12:.0f} TFLOPS"
    head += f", FP8 {fp8 / 1e12:.0f} TFLOPS" if fp8 else ""
    rows = [_cells(line) for line in values["lines"]]
    text = [head, table(("kernel", "row", "us", "floor us", "of floor", "GB/s", "TFLOPS"), rows)]
    text += [f"{name}: {why}" for name, why in values["refused"].items()]
    if values.get("left_out"):
        text.append(f"no time left for {len(values['left_out'])} cases, from {values['left_out'][0]} on")
    text += [targets_text(values["targets"])]
    return "\n".join(text)


def _cells(line: dict[str, Any]) -> tuple[str, ...]:
    names = line["kernel"], line["row"]
    floor = f"{line['floor_us']:.1f}" if "floor_us" in line else "-"
    if "us" not in line:
        return *names, "-", floor, line.get("failed") or line["not_served"], "", ""
    rates = f"{line['bytes_per_s'] / 1e9:.0f}", f"{line['flops_per_s'] / 1e12:.1f}"
    return *names, f"{line['us']:.1f}", floor, f"{line['of_floor']:.2f}", *rates


def targets_text(targets: Sequence[dict[str, Any]]) -> str:
    """Each target with the reached value."""
    cells = []
    for target in targets:
        reached = "-" if target["reached"] is None else f"{target['reached']:.2f}"
        cells.append((target["name"], f"{target['wanted']:.2f}", reached, "yes" if target["met"] else "no"))
    return table(("target", "wanted", "reached", "met"), cells)
