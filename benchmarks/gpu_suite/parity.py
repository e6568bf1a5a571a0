"""Every row of every family against the torch row, on the same inputs on the same GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_suite.rows import Rows
from benchmarks.kernel_cases import KernelCase, NotServed

BF16_ERROR = 1e-2
FP8_ERROR = 6e-2
"""Of the difference's norm over the result's: products in bf16, and products whose rows are quantised to e4m3."""

MOST_BYTES = 2 << 30
"""Larger cases are left to the timings: parity needs no size."""


def compare(
    cases: Iterable[KernelCase], rows: Rows, device: str = "cuda", is_over: Callable[[], bool] = lambda: False
) -> list[dict[str, Any]]:
    """A line for each case that torch serves and each other row: the error, its bound, whether it holds; or what went
    wrong. No case is begun when time is over."""
    lines = []
    for case in cases:
        if is_over():
            break
        kernels = rows.kernels[case.family]
        others = {name: kernel for name, kernel in kernels.items() if name != "torch"}
        if not others or "torch" not in kernels or case.bytes > MOST_BYTES:
            continue
        try:
            expected = _result(case, kernels["torch"], device)
        except NotServed:
            continue
        for name, kernel in others.items():
            bound = FP8_ERROR if case.fp8 else BF16_ERROR
            line: dict[str, Any] = {"kernel": case.name, "row": name, "bound": bound}
            try:
                line["error"] = difference(_result(case, kernel, device), expected)
                line["ok"] = line["error"] <= bound
            except NotServed as why:
                line |= {"not_served": str(why), "ok": True}
            except Exception as error:
                line |= {"failed": f"{type(error).__name__}: {error}", "ok": False}
            lines.append(line)
    return lines


def _result(case: KernelCase, kernel: Any, device: str) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    found = case.prepare(kernel, device)()
    tensors = found if isinstance(found, tuple) else (found,)
    return tuple(tensor.clone() for tensor in tensors)


def difference(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The worst of all tensors: norm of the difference over the norm expected; of integers, the share that differs."""
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
