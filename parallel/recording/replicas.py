"""Merges the replicas' counts into one dump. Imports nothing heavy, since the front end runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


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
