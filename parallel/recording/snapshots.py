"""The live view of all ranks. Imports nothing heavy: a front end sums what several cores answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def sum_snapshots(snapshots: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """One view from those of ranks (`ExpertRecorder.snapshot`), or from sums of such; None where there is none."""
    found = [snapshot for snapshot in snapshots if snapshot is not None]
    if not found:
        return None
    counts = [s["counts"] for s in found if s["counts"] is not None]  # [layers][experts] of each
    return {
        **found[0],
        "counts": [[sum(of_ranks) for of_ranks in zip(*layer)] for layer in zip(*counts)] if counts else None,
        "balancedness": next((s["balancedness"] for s in found if s["balancedness"]), {}),
        "recording": any(snapshot["recording"] for snapshot in found),
        "pass": max(snapshot["pass"] for snapshot in found),
    }
