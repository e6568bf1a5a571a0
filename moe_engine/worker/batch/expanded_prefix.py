"""Keeps the keys and values of a prefix shared by running decodes, expanded per head.

A decode attends to MLA's latent: 2C + P operations per head and context token instead of N + P + V, because expanding a
context costs more than a step saves. For a prefix of many requests the expansion pays off within a few steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moe_engine.kernels.decoder.shared_prefix import BLOCK, SharedPrefix
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.batch.shared_prefix import find_sharers

LEAST_MEMBERS = 16
"""Decodes below which a prefix is not expanded: with 16 the expansion costs what they save in about ten steps."""


class ExpandedPrefix:
    """At most one expanded prefix. It is valid while a request of its last use runs, as a request's slots are not
    written behind its back.

    Args:
        expand: slots [S] int32 -> their keys and values.
        most_tokens: max tokens of the prefix.
    """

    def __init__(self, rows: RequestRows, expand: Callable[[np.ndarray], SharedPrefix], most_tokens: int) -> None:
        self._rows = rows
        self._expand = expand
        self._most = most_tokens
        self._prefix: SharedPrefix | None = None
        self._slots = np.empty(0, dtype=np.int32)
        self._owners: dict[int, int] = {}  # of the rows of its last use

    def of(self, rows: np.ndarray, positions: np.ndarray) -> SharedPrefix | None:
        """The prefix of a step of decodes, assigned to those that begin with it; None if it is not worth it.

        Args:
            rows: [R] int64; tokens [0, position) of each have slots in the table.
        """
        table = self._rows.slots_on_host
        assert table is not None
        members = self._members(table, rows, positions)
        if not self._owners_of(rows[members]).items() & self._owners.items():
            self._prefix, self._owners, members = None, {}, members[:0]
        if len(members) < LEAST_MEMBERS:
            slots = self._best(table, rows, positions)
            if slots is None:
                return None
            self._prefix = None  # its memory is free before the next one is computed
            self._prefix, self._slots = self._expand(slots), slots
            members = self._members(table, rows, positions)
        assert self._prefix is not None
        self._owners = self._owners_of(rows[members])
        self._prefix.assign(members)
        return self._prefix

    def _owners_of(self, rows: np.ndarray) -> dict[int, int]:
        """By row, the number of its request."""
        return dict(zip(rows.tolist(), self._rows.owners[rows].tolist()))

    def _members(self, table: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Places of the rows that begin with the prefix's slots, [M] int64."""
        length = len(self._slots)
        return np.flatnonzero((table[rows, :length] == self._slots).all(axis=1) & (positions >= length))

    def _best(self, table: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
        """Slots of the prefix with the most work in this step, if it is worth its expansion."""
        groups = [
            (len(group.members) * length, int(rows[group.members[0]]), length)
            for group in find_sharers(table, rows, positions, range(len(rows)))
            if len(group.members) >= LEAST_MEMBERS and (length := min(group.length, self._most) // BLOCK * BLOCK)
        ]
        if not groups:
            return None
        _, row, length = max(groups)
        return table[row, :length].copy()
