"""Every row of every family against the torch row, on the same inputs on the same GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_suite.attempts import Attempts
from benchmarks.gpu_suite.rows import Rows
from benchmarks.gpu_suite.setting import Setting
from benchmarks.kernel_cases import KernelCase, NotServed
from tests.kernels.choices import Routed

BF16_ERROR = 1e-2
FP8_ERROR = 6e-2
"""Bounds of the difference's norm over the result's: products in bf16, and products with rows quantized to e4m3."""

MOST_BYTES = 2 << 30
"""Larger cases are only timed: parity does not depend on size."""


def compare(cases: Iterable[KernelCase], rows: Rows, setting: Setting) -> dict[str, Any]:
    """A line for each case that torch supports and each other row: the error, its bound, whether the bound holds; or
    the failure. `wrong` counts violations, `left_out` lists cases skipped for lack of time.

    Raises:
        DeviceLost: see `attempts`.
    """

    def values(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"lines": lines, "refused": rows.refused, "wrong": sum(not line["ok"] for line in lines)}

    attempts, left_out = Attempts(setting, values), []
    for case in cases:
        kernels = rows.kernels[case.family]
        others = attempts.rows(case, {name: kernel for name, kernel in kernels.items() if name != "torch"})
        if not others or "torch" not in kernels or case.bytes > MOST_BYTES:
            continue
        if setting.is_over:
            left_out.append(case.name)
            continue
        expected: list[tuple[Tensor, ...]] = []
        for name, kernel in others.items():
            attempts.run(case, name, partial(line_of, case, kernel, kernels["torch"], expected, setting.kind))
    return values(attempts.lines) | {"left_out": left_out}


def line_of(
    case: KernelCase, kernel: Any, reference: Any, expected: list[tuple[Tensor, ...]], device: str
) -> dict[str, Any]:
    """One row's line. `expected` caches the reference's result."""
    bound = FP8_ERROR if case.fp8 else BF16_ERROR
    line: dict[str, Any] = {"bound": bound}
    prefix = "torch: "
    try:
        if not expected:
            expected.append(_result(case, reference, device))
        prefix = ""
        found = difference(_result(case, kernel, device), expected[0])
    except NotServed as why:
        return line | {"not_served": f"{prefix}{why}", "ok": True}
    except Exception as error:
        return line | {"failed": f"{prefix}{type(error).__name__}: {error}", "ok": False}
    return line | {"error": found, "ok": found <= bound}


def _result(case: KernelCase, kernel: Any, device: str) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    found = case.compared(case.prepare(kernel, device)())
    parts = found if isinstance(found, tuple) else (found,)
    return tuple(part.relative_weights() if isinstance(part, Routed) else part.clone() for part in parts)


def difference(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The worst of all tensors: norm of the difference over the expected norm; for integers, the share that differs."""
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        if a.shape != b.shape:
            raise ValueError(f"shape {list(a.shape)} instead of {list(b.shape)}")
        if not b.is_floating_point():
            error = float((a != b).double().mean())
        elif not bool(a.isfinite().all()):
            error = float("inf")
        else:
            error = float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
        worst = max(worst, error)
    return worst
