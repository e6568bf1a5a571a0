"""The live view of all ranks. Imports no torch, so that a front end can sum what several cores answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def sum_snapshots(snapshots: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """One view from those of ranks (`ExpertRecorder.snapshot`), or from sums of such; None where there is none."""
    found = [snapshot for snapshot in snapshots if snapshot is not None]
    if not found:
        return None
    counts = [np.asarray(s["counts"], dtype=np.int64) for s in found if s["counts"] is not None]
    return {
        **found[0],
        "counts": np.sum(counts, axis=0).tolist() if counts else None,
        "balancedness": next((s["balancedness"] for s in found if s["balancedness"]), {}),
        "recording": any(snapshot["recording"] for snapshot in found),
        "pass": max(snapshot["pass"] for snapshot in found),
    }
