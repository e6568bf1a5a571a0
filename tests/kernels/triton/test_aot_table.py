"""The committed table of compiled kernels has every case."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.report import RESULTS


def test_the_committed_table_has_every_case() -> None:
    """Cases by name, for both architectures; no spills, and the table in Markdown beside it."""
    from benchmarks.aot_table import ARCHS, lacking, markdown, read
    from moe_engine.kernels.triton.modules import all_cases

    file, cases = max(RESULTS.glob("*_cpu_aot_table.json")), all_cases()
    missing = sorted({case.name for case, _ in lacking(file, cases)})
    shown = Path("benchmarks/results", file.name)
    assert not missing, f"python -m benchmarks.aot_table --complete {shown} compiles {', '.join(missing)}"
    rows = json.loads(file.read_text())["kernels"]
    assert len(rows) == len(ARCHS) * len(cases), "it has kernels that are no cases any more"
    assert not any(row["problems"] for row in rows)
    assert file.with_suffix(".md").read_text() == markdown([read(row) for row in rows])
