"""Replies of the cores joined in the frontend: the live view, and parts of a dump. Imports nothing heavy."""

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


def align_passes(replicas: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The parts of all replicas (`merge.Part`) as parts of one: replicas number passes independently; the newest
    pass of each gets the same id, so that a ring keeps equally much of each. Sums do not change.
    """
    newest = [max((n for part in parts for n in part.get("pass_ids", ())), default=0) for parts in replicas]
    return [
        {**part, "pass_ids": [n + max(newest) - own for n in part["pass_ids"]]} if "pass_ids" in part else dict(part)
        for parts, own in zip(replicas, newest)
        for part in parts
    ]
