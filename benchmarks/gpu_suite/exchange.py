"""Dispatch, combine and all-reduce through symmetric memory with all ranks in one process on one GPU: correctness of
the kernels, and the time of each launch without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from benchmarks.gpu_suite import all_reduce
from benchmarks.gpu_suite.attempts import Attempts
from benchmarks.gpu_suite.parity import BF16_ERROR, FP8_ERROR
from benchmarks.gpu_suite.ranks_here import NUM_SLOTS, TINY, TINY_BESIDE, V3_BESIDE, V3_EP8, Load, RanksHere, error_of
from benchmarks.gpu_suite.setting import Setting
from benchmarks.gpu_suite.targets import OURS


class Exchange(NamedTuple):
    """A line of the part: its name, and the function that measures it."""

    name: str
    measure: Callable[[], dict[str, Any]]
    family: str = "symm_mem"


def measure(setting: Setting) -> dict[str, Any]:
    """DeepSeek V3's experts on 8 ranks, 128 tokens each, rows in bf16 and in FP8: error and microseconds per rank; and
    with few programs on separate streams, as are those of all-reduces.

    Raises:
        DeviceLost: see `attempts`.
    """
    if setting.kind == "cpu":
        return {"skipped": "needs the memory of a GPU"}
    from benchmarks.gpu_suite.clock import Clock

    def values(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"lines": lines, "wrong": sum(not line["ok"] for line in lines)}

    attempts = Attempts(setting, values)
    left_out = []
    for case in _cases(setting, Clock(setting.kind, setting.dry)):
        for row in attempts.rows(case, {OURS: None}):
            if setting.is_over:
                left_out.append(case.name)
            else:
                attempts.run(case, row, partial(_line, case))
    return values(attempts.lines) | {"left_out": left_out}


def _cases(setting: Setting, clock: Any) -> list[Exchange]:
    load, beside = (TINY, TINY_BESIDE) if setting.dry else (V3_EP8, V3_BESIDE)
    found = []
    for fp8 in (False, True):
        own = partial(_exchange, replace(load, fp8=fp8), replace(beside, fp8=fp8), clock)
        found.append(Exchange(f"v3_ep8.t{load.tokens}{'.fp8' * fp8}", own))
    ranks, width = all_reduce.shape_of(setting.dry)
    for rows in all_reduce.ROWS:
        sums = partial(all_reduce.measure, ranks, width, rows, clock)
        found.append(Exchange(f"all_reduce.{ranks}x{width}.t{rows}", sums))
    return found


def _line(case: Exchange) -> dict[str, Any]:
    try:
        return case.measure()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}", "ok": False}


def _exchange(load: Load, beside: Load, clock: Any) -> dict[str, Any]:
    bound = FP8_ERROR if load.fp8 else BF16_ERROR
    error_beside, ranks = _error_beside(beside), RanksHere(load, "cuda")
    error = max(error_of(ranks.run(number % 2), ranks.expected()) for number in range(3))
    lost = ranks.lost.nonzero().flatten().tolist()
    ok = max(error, error_beside) <= bound and not lost
    us = _times(ranks, clock, load.num_ranks)
    return {"bound": bound, "error": error, "error_beside": error_beside, "lost": lost, "ok": ok, "us": us}


def _error_beside(load: Load) -> float:
    """Error of ranks on separate streams; infinite if a rank was lost."""
    ranks = RanksHere(load, "cuda")
    expected = ranks.expected()
    for number in range(NUM_SLOTS):
        ranks.run(number, apart=True)
    error = max(error_of(ranks.run_beside(number % NUM_SLOTS), expected) for number in range(4))
    return float("inf") if ranks.lost.any() else error


def _times(ranks: RanksHere, clock: Any, num_ranks: int) -> dict[str, float]:
    """Microseconds per rank of each phase. A phase can be relaunched by all ranks with the same inputs."""
    found: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        result = call()
        found[name] = clock.seconds(call) / num_ranks * 1e6
        return result

    ranks.run(0, timed)
    return found


def as_text(values: dict[str, Any]) -> str:
    """Text report."""
    from benchmarks.report import table

    cells = []
    for line in values["lines"]:
        if "failed" in line:
            cells.append((line["kernel"], "-", "NO", line["failed"]))
            continue
        times = [f"{name} {us:.1f}" for name, us in line["us"].items()]
        error = max(line["error"], line.get("error_beside", 0.0))
        cells.append((line["kernel"], f"{error:.1e}", "yes" if line["ok"] else "NO", ", ".join(times)))
    return table(("exchange, all ranks on this GPU", "error", "ok", "us per rank"), cells)
