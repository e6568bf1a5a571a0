"""The live view of all ranks. Imports nothing heavy, since the front end sums the cores' replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def sum_snapshots(snapshots: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Sum of the ranks' snapshots (`ExpertRecorder.snapshot`), or of such sums; None if there is none."""
    found = [snapshot for snapshot in snapshots if snapshot is not None]
    if not found:
        return None
    counts = [s["counts"] for s in found if s["counts"] is not None]  # [layers][experts] per snapshot
    return {
        **found[0],
        "counts": [[sum(of_ranks) for of_ranks in zip(*layer)] for layer in zip(*counts)] if counts else None,
        "balancedness": next((s["balancedness"] for s in found if s["balancedness"]), {}),
        "recording": any(snapshot["recording"] for snapshot in found),
        "pass": max(snapshot["pass"] for snapshot in found),
    }
