"""Dispatch, combine and all-reduce through symmetric memory with all ranks in one process on one GPU: correctness of
the kernels, and the time of each launch without waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu_suite import all_reduce
from benchmarks.gpu_suite.ranks_here import (
    NUM_SLOTS,
    TINY,
    TINY_BESIDE,
    V3_BESIDE,
    V3_EP8,
    Load,
    RanksHere,
    error_of,
)
from benchmarks.gpu_suite.setting import Setting


def measure(setting: Setting) -> dict[str, Any]:
    """DeepSeek V3's experts on 8 ranks, 128 tokens each, rows in bf16 and in FP8: error and microseconds per rank; and
    with few programs on separate streams, as are those of all-reduces."""
    if setting.kind == "cpu":
        return {"skipped": "needs the memory of a GPU"}
    from benchmarks.gpu_suite.clock import Clock

    clock, lines = Clock(setting.kind, setting.dry), []
    load, beside = (TINY, TINY_BESIDE) if setting.dry else (V3_EP8, V3_BESIDE)
    for fp8, bound in ((False, 1e-2), (True, 6e-2)):
        name = f"v3_ep8.t{load.tokens}{'.fp8' if fp8 else ''}"
        line: dict[str, Any] = {"name": name, "bound": bound, "error_beside": _error_beside(replace(beside, fp8=fp8))}
        ranks = RanksHere(replace(load, fp8=fp8), setting.kind)
        line["error"] = max(error_of(ranks.run(number % 2), ranks.expected()) for number in range(3))
        line["lost"] = ranks.lost.nonzero().flatten().tolist()
        line["ok"] = max(line["error"], line["error_beside"]) <= bound and not line["lost"]
        line["us"] = _times(ranks, clock, load.num_ranks)
        lines.append(line)
        setting.save(_values(lines))
        del ranks
        torch.cuda.empty_cache()
    for rows in all_reduce.ROWS:
        lines.append(all_reduce.measure(*all_reduce.shape_of(setting.dry), rows, clock))
        setting.save(_values(lines))
    return _values(lines)


def _values(lines: list[dict[str, Any]]) -> dict[str, Any]:
    return {"lines": lines, "wrong": sum(not line["ok"] for line in lines)}


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
        times = [f"{name} {us:.1f}" for name, us in line["us"].items()]
        error = max(line["error"], line.get("error_beside", 0.0))
        cells.append((line["name"], f"{error:.1e}", "yes" if line["ok"] else "NO", ", ".join(times)))
    return table(("exchange, all ranks on this GPU", "error", "ok", "us per rank"), cells)
