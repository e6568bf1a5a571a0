"""Prompts of a step that begin in the same KV slots: what MLA's expanded form rebuilds for one of them serves all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

LEAST = 64
"""Shared tokens below which it is not worth knowing."""


@dataclass(frozen=True)
class Sharers:
    """Runs of a step, by their numbers, whose first `length` tokens lie in the same slots."""

    members: list[int]
    length: int

    @property
    def spared(self) -> float:
        """Tokens that each of them need not rebuild, the work being divided among all."""
        return self.length * (1 - 1 / len(self.members))


def find_sharers(table: np.ndarray, rows: np.ndarray, starts: np.ndarray, runs: Iterable[int]) -> list[Sharers]:
    """Which of the `runs` begin alike. Slots belong to one token each, so the first tells who may.

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
