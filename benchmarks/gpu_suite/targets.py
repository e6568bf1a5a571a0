"""Targets of the kernels and the engine on one H200, and their evaluation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OURS = "triton"


@dataclass(frozen=True)
class Target:
    """The slowest of this project's rows whose shape matches `pattern` must reach `wanted`.

    kind: ``copy`` (share of the measured copy bandwidth), ``tflops``, or a row's name (its time over theirs).
    """

    name: str
    pattern: str
    kind: str
    wanted: float


TARGETS = (
    Target("MLA decode, 16 heads, 128 x 2K to 8K: share of copy bandwidth",
           r"^deepseek-v2-lite\.absorbed\.h16\.r128\.q1\.", "copy", 0.85),
    Target("MLA decode, 128 heads: TFLOPS", r"^deepseek-v3\.absorbed\.h128\.r128\.q1\.", "tflops", 550.0),
    Target("FP8 product 4096 x 7168 x 16384: against DeepGEMM", r"^deepseek-v3\.o\.m4096$", "deep_gemm", 0.9),
    Target("FP8 product, 64 rows: share of copy bandwidth", r"^deepseek-v3\.(o|q_b|dense_\w+)\.m64$", "copy", 0.85),
    Target("FP8 experts, 8 to 128 rows each: against DeepGEMM", r"^experts\.padded\.m", "deep_gemm", 1.0),
    Target("norms: share of copy bandwidth", r"^deepseek-v3\.(add_)?rms_norm\.7168\.t4096$", "copy", 0.85),
    Target("SiLU-mul: share of copy bandwidth", r"^deepseek-v3\.silu_and_mul\.18432\.t4096$", "copy", 0.85),
    Target("rotary: share of copy bandwidth", r"^deepseek-v3\.rotate\.\S+\.t4096$", "copy", 0.85),
    Target("residual norm with quantization: share of copy bandwidth", r"^add_rms_norm_quantized\.", "copy", 0.85),
    Target("quantization: share of copy bandwidth", r"^quantize\.", "copy", 0.85),
    Target("permutation: share of copy bandwidth", r"^permute\.", "copy", 0.85),
)  # fmt: skip

ENGINE_TARGETS = {
    "decode.b1": (436.0, 773.0), "decode.b32": (3450.0, 3860.0), "decode.b128": (11400.0, 12560.0),
    "decode.b256": (19200.0, 20780.0), "offline": (20000.0,),
}  # fmt: skip
"""Tokens per second of DeepSeek-V2-Lite's shape in bf16, a first target and the goal: decodes after 2K tokens; 1K in
and 1K out, offline."""


def check(target: Target, lines: Sequence[dict[str, Any]], copy_bytes_per_s: float) -> dict[str, Any]:
    """Target and worst reached value; None if no matching case was measured."""
    times = {(line["kernel"], line["row"]): line for line in lines if "us" in line}
    found = []
    for (kernel, row), line in times.items():
        if row != OURS or not re.search(target.pattern, kernel):
            continue
        if target.kind == "copy":
            found.append(line["bytes_per_s"] / copy_bytes_per_s)
        elif target.kind == "tflops":
            found.append(line["flops_per_s"] / 1e12)
        elif (kernel, target.kind) in times:
            found.append(times[kernel, target.kind]["us"] / line["us"])
    reached = min(found) if found else None
    return {
        "name": target.name, "wanted": target.wanted, "reached": reached,
        "met": reached is not None and reached >= target.wanted,
    }  # fmt: skip


def check_all(lines: Sequence[dict[str, Any]], copy_bytes_per_s: float) -> list[dict[str, Any]]:
    """All kernel targets."""
    return [check(target, lines, copy_bytes_per_s) for target in TARGETS]


def check_engine(reached: dict[str, float]) -> list[dict[str, Any]]:
    """The engine's targets, by the names of `ENGINE_TARGETS`, in tokens per second; the second target is the goal."""
    return [
        {"name": f"engine {name}, tokens/s{': goal' if nth else ''}", "wanted": wanted, "reached": reached.get(name),
         "met": reached.get(name, 0.0) >= wanted}
        for name, marks in ENGINE_TARGETS.items() for nth, wanted in enumerate(marks)
    ]  # fmt: skip
