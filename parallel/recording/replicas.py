"""What replicas have counted, on its way to one dump. Imports nothing heavy: a front end does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def align_passes(replicas: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The parts of all replicas (`merge.Part`) as of one: replicas number their passes each for itself, and now the
    newest of each have the same number, so that a ring keeps as much of one as of the other. Sums stay what they are.
    """
    newest = [max((n for part in parts for n in part.get("pass_ids", ())), default=0) for parts in replicas]
    return [
        {**part, "pass_ids": [n + max(newest) - own for n in part["pass_ids"]]} if "pass_ids" in part else dict(part)
        for parts, own in zip(replicas, newest)
        for part in parts
    ]
