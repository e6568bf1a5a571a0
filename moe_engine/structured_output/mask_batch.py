"""Masks of several requests in one call of a backend's library, which may use several threads.

Legend: P positions of a step, W 32-bit words of a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Entries = list[tuple[Any, int]]
"""A library's state of a request, and its row of the tables."""
FillAll = Callable[[Entries, np.ndarray], None]
"""Writes the masks of all entries to tables [P, W]. A state whose mask fails keeps the error."""


class MaskBatch:
    """tables [P, W] uint32, C-contiguous: full masks at first. `add` leaves a row to `run`."""

    def __init__(self, tables: np.ndarray) -> None:
        self.tables = tables
        self._waiting: dict[FillAll, Entries] = {}

    def add(self, fill_all: FillAll, state: Any, place: int) -> None:
        """Row `place` is written by `fill_all` in `run`, whatever it holds before."""
        self._waiting.setdefault(fill_all, []).append((state, place))

    def run(self) -> None:
        for fill_all, entries in self._waiting.items():
            fill_all(entries, self.tables)
        self._waiting.clear()


class FilledAtOnce:
    """The part of `core.late_masks.PositionMasks` that concerns batches, for masks that need no batch."""

    def fill(self, mask: np.ndarray) -> None:
        raise NotImplementedError

    def fill_later(self, batch: MaskBatch, place: int) -> None:
        self.fill(batch.tables[place])

    def check(self) -> None:
        """No-op: `fill` has already raised any error."""
