"""Finds prompts of a step with a shared prefix (the same KV slots), which MLA's expanded form expands once for all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

LEAST = 64
"""Shared tokens below which sharing does not pay off."""


@dataclass(frozen=True)
class Sharers:
    """Runs of a step, by index, whose first `length` tokens are in the same slots."""

    members: list[int]
    length: int

    @property
    def spared(self) -> float:
        """Tokens that each member need not expand, with the work divided evenly."""
        return self.length * (1 - 1 / len(self.members))


def find_sharers(table: np.ndarray, rows: np.ndarray, starts: np.ndarray, runs: Iterable[int]) -> list[Sharers]:
    """Groups of `runs` with a shared prefix. Runs with the same first slot are candidates.

    Args:
        table: slots [max_rows, width].
        rows, starts: of every run; tokens [0, start) of its row have slots in the table.
    """
    by_first: dict[int, list[int]] = {}
    for run in runs:
        if starts[run] >= LEAST:
            by_first.setdefault(int(table[rows[run], 0]), []).append(run)
    found = []
    for members in by_first.values():
        if len(members) < 2:
            continue
        shortest = int(starts[members].min())
        slots = table[rows[members], :shortest]
        same = (slots == slots[0]).all(axis=0)
        length = shortest if same.all() else int(same.argmin())
        if length >= LEAST:
            found.append(Sharers(members, length))
    return found
