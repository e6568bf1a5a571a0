"""The committed cases: each group is one worker in a separate process, whose batches run one after the other."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = Path(__file__).with_name("expected.json")
"""Values of `CHECKED` groups that CI checks."""
HELD = (
    "host_waits",
    "launches_a_layer",
    "launches_outside",
    "early_launches",
    "bytes",
    "prefetched_bytes",
    "nvlink_bytes",
    "network_bytes",
)
DECODES = (1, 32, 128, 256)


@dataclass(frozen=True)
class Group:
    """Arguments of one run of the program. `batches`: requests of a rank, or of a TP group."""

    model: str
    form: str
    batches: tuple[int, ...] = DECODES
    rows: str = "vendors"
    mtp: int = 0
    prefill: int = 0
    dispatch: str = "deepep"
    drafter: str = "mtp"
    attention: str = "auto"
    topk: int = 1
    threshold: float = 1.0
    context: int = 2048
    hardware: str = "H200x8"

    @property
    def name(self) -> str:
        work = f"prefill {self.prefill}" if self.prefill else "decode"
        work += f" {self.drafter} {self.mtp}" if self.mtp else ""
        work += f" tree {self.topk}" if self.topk > 1 else ""
        work += f" threshold {self.threshold}" if self.threshold < 1 else ""
        work += f" {self.attention}" if self.attention != "auto" else ""
        work += f" after {self.context}" if self.context != 2048 else ""
        work += f" on {self.hardware}" if self.hardware != "H200x8" else ""
        return f"{self.model} {self.form} {self.rows} {work}" + f" {self.dispatch}" * (self.dispatch != "deepep")

    def arguments(self) -> list[str]:
        more = ["--prefill", self.prefill] if self.prefill else ["--batch", *self.batches, "--mtp", self.mtp]
        found = ["--model", self.model, "--form", self.form, "--rows", self.rows, "--context", self.context, *more]
        found += ["--dispatch", self.dispatch, "--drafter", self.drafter, "--attention", self.attention]
        found += ["--topk", self.topk, "--threshold", self.threshold, "--hardware", self.hardware]
        return [str(x) for x in found]


GROUPS = (
    Group("v2-lite", "tp1", rows="triton"),
    Group("v2-lite", "tp1"),
    Group("v3", "dp8ep8"),
    Group("v3", "dp8ep8", dispatch="deepep2"),
    Group("v3", "tp8"),
    Group("v3", "dp16ep16"),
    Group("v3", "dp8ep8", dispatch="symm_mem"),
    Group("v3", "dp8ep8", rows="triton", dispatch="symm_mem"),
    Group("v3", "dp8ep8", dispatch="megamoe"),
    Group("v3", "dp8ep8", (1, 32, 128), mtp=1),
    Group("v3", "tp8", (1, 32), mtp=3),
    Group("v3", "tp8", (1, 32), mtp=3, drafter="mtp2"),
    Group("v3", "tp8", (32,), mtp=3, drafter="ngram"),
    Group("v3", "tp8", (32,), "triton", mtp=3),
    Group("v3", "tp8", (32,), mtp=3, topk=4),
    Group("v3", "tp8", (32,), mtp=3, threshold=0.9),
    Group("v3", "tp8", (32,), mtp=3, drafter="standalone"),
    Group("v3.2", "dp8ep8", context=8192),
    Group("v3.2", "tp8", context=8192),
    Group("v4-flash", "dp8ep8", context=8192),
    Group("v4-flash", "tp8", context=8192),
    Group("v4-pro", "dp8ep8", context=8192),
    Group("v41-flash", "dp8ep8", context=8192),
    Group("v41-flash", "tp8", context=8192),
    Group("llama-8b-row-fp8", "tp1"),
    Group("v3-row-fp8", "tp8"),
    Group("glm-5.3-flash", "tp8", context=8192),
    Group("minimax-m3", "tp4", context=8192),
    Group("gpt-oss-120b", "tp4"),
    Group("qwen3-next", "tp4"),
    Group("glm-4.6", "tp8ep2"),
    Group("kimi-k2", "tp8"),
    Group("kimi-k2", "dp8ep8"),
    Group("v2-lite", "tp1", (1,), prefill=8192),
    Group("v3", "dp8ep8", (1,), prefill=8192),
    Group("v3", "tp8", (1,), prefill=8192),
    Group("minimax-m3", "tp4", (1,), prefill=8192),
    Group("v3", "dp8ep8", (128, 256), hardware="B200x8"),
    Group("v3", "tp8", (8,), hardware="B200x8"),
    Group("gpt-oss-120b", "tp4", (1, 128), hardware="B200x8"),
)
CHECKED = (
    Group("v2-lite", "tp1", (1, 128), "triton"),
    Group("v3", "dp8ep8", (1, 128)),
    Group("v3", "tp8", (1,)),
    Group("v3", "dp8ep8", (32,), mtp=1),
    Group("v3", "dp8ep8", (128,), dispatch="symm_mem"),
    Group("v3", "dp8ep8", (128,), dispatch="deepep2"),
    Group("v3", "tp8", (8,), mtp=3, topk=4),
    Group("v3", "dp8ep8", (1,), prefill=8192),
    Group("v3.2", "dp8ep8", (8,), context=8192),
    Group("v4-flash", "dp8ep8", (8,), context=8192),
    Group("v4-flash", "tp8", (1,), context=8192),
    Group("v41-flash", "dp8ep8", (8,), context=8192),
    Group("v41-flash", "tp8", (1,), context=8192),
    Group("llama-8b-row-fp8", "tp1", (1, 32)),
    Group("v3-row-fp8", "tp8", (8,)),
    Group("glm-5.3-flash", "tp8", (1,), context=8192),
    Group("minimax-m3", "tp4", (8,), context=8192),
    Group("minimax-m3", "tp4", (1,), prefill=8192),
    Group("gpt-oss-120b", "tp4", (8,)),
    Group("glm-4.6", "tp8ep2", (8,)),
    Group("qwen3-next", "tp4", (8,)),
    Group("v3", "dp8ep8", (128,), hardware="B200x8"),
    Group("v3", "tp8", (8,), hardware="B200x8"),
    Group("gpt-oss-120b", "tp4", (8,), hardware="B200x8"),
)
"""Groups that are fast enough for every run of the tests."""


class CaseFailed(RuntimeError):
    """A run of the program failed; with its last lines."""


def in_an_interpreter(arguments: Sequence[str]) -> tuple[int, str]:
    """Runs the program in a separate process: return code and standard error."""
    command = [sys.executable, "-m", "benchmarks.step_costs", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stderr


def run(group: Group, start: Callable[[Sequence[str]], tuple[int, str]] = in_an_interpreter) -> list[dict[str, Any]]:
    """The values of a group's cases; `start` runs the program in another process."""
    with tempfile.TemporaryDirectory(prefix="moe-engine-step-costs-") as folder:
        file = Path(folder) / "values.json"
        code, errors = start([*group.arguments(), "--json", str(file)])
        if code:
            raise CaseFailed(f"{group.name}: {' '.join(errors.strip().splitlines()[-3:])}")
        found: list[dict[str, Any]] = json.loads(file.read_text())["cases"]
    return found


def run_all(groups: Sequence[Group]) -> Iterator[tuple[Group, list[dict[str, Any]]]]:
    """Groups one after the other, with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(groups))
        for group in groups:
            progress.update(task, description=group.name)
            yield group, run(group)
            progress.advance(task)


def held(values: dict[str, Any]) -> dict[str, Any]:
    """The exact values of a case: those independent of a device's constants."""
    return {key: values[key] for key in HELD}


def expected() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(EXPECTED.read_text())
    return found


def update_expected() -> None:
    """Writes the current values, after each group."""
    known = expected()
    found: dict[str, dict[str, Any]] = {}
    for _, cases in run_all(CHECKED):
        found |= {values["case"]: held(values) for values in cases}
        EXPECTED.write_text(json.dumps(known | found, indent=1) + "\n")
    EXPECTED.write_text(json.dumps(found, indent=1) + "\n")
