"""Keeps the keys and values of a prefix shared by running requests, expanded per head.

A decode attends to MLA's latent: 2C + P operations per head and context token instead of N + P + V, because expanding a
context costs more than a step saves. For a prefix of many requests the expansion pays off within a few steps. Prompts
are expanded anyway: the context of the last prompt that was alone in its step is kept for requests that share it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from moe_engine.kernels.decoder.shared_prefix import BLOCK, SharedPrefix
from moe_engine.kernels.queries import PagedQueries
from moe_engine.models.batch import ExpandedContext
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.batch.shared_prefix import LEAST, find_sharers

LEAST_MEMBERS = 16
"""Decodes below which a prefix is not expanded: with 16 the expansion costs what they save in about ten steps."""

Layers = dict[int, tuple[Tensor, Tensor]]
"""Keys and values [S, H, N+V] and rotary channels of the keys [S, P], by layer index."""


class ExpandedPrefix:
    """At most one expanded prefix. It is valid while a request of its last use runs, as a request's slots are not
    written behind its back.

    Args:
        expand: slots [S] int32 -> their keys and values.
        most_tokens: max tokens of the prefix.
        num_layers: layers of the model.
    """

    def __init__(
        self, rows: RequestRows, expand: Callable[[np.ndarray], Layers], most_tokens: int, num_layers: int
    ) -> None:
        self._rows = rows
        self._expand = expand
        self._most = most_tokens
        self._num_layers = num_layers
        self.prefix: SharedPrefix | None = None
        """The prefix as decodes read it; None: only prompts have used it."""
        self._layers: Layers = {}
        self._slots = np.empty(0, dtype=np.int32)
        self._owners: dict[int, int] = {}  # of the rows of its last use

    def of(self, rows: np.ndarray, positions: np.ndarray) -> SharedPrefix | None:
        """The prefix of a step of decodes, assigned to those that begin with it; None if it is not worth it.

        Args:
            rows: [R] int64; tokens [0, position) of each have slots in the table.
        """
        self._drop_if_dead()
        members = self._members(rows, positions)
        if len(members) < LEAST_MEMBERS:
            slots = self._best(rows, positions)
            if slots is None:
                return None
            if not self._knows(slots):
                self.forget()  # its memory is free before the next one is computed
                self._layers = self._expand(slots)
            self._slots = slots
            each = [self._layers[i] for i in range(self._num_layers)]
            self.prefix = SharedPrefix([(kv[: len(slots)], rope[: len(slots)]) for kv, rope in each])
            members = self._members(rows, positions)
        assert self.prefix is not None
        self._owners = self._owners_of(rows[members])
        self.prefix.assign(members)
        return self.prefix

    def of_prompts(self, prompts: PagedQueries) -> ExpandedContext | None:
        """What is known or kept of a step's expanded prompts, whose context tokens have slots in the table."""
        table, rows = self._table, prompts.rows.numpy()
        self._drop_if_dead()
        for run in prompts.shared:
            length = min(run.length, len(self._slots))
            if length >= LEAST and self._knows(table[rows[run.first], :length]):
                return ExpandedContext(self._layers, run, length)
        if prompts.num_requests > 1 or not BLOCK <= prompts.context_lens[0] <= self._most:
            return None
        if self.prefix is not None and len(self._owners) >= LEAST_MEMBERS:
            return None  # decodes still read it
        self.forget()
        self._slots = table[rows[0], : prompts.context_lens[0]].copy()
        self._owners = self._owners_of(rows)
        return ExpandedContext(self._layers)

    def forget(self) -> None:
        """Drops the prefix: its weights or its slots get other values."""
        self.prefix, self._layers, self._owners, self._slots = None, {}, {}, self._slots[:0]

    @property
    def _table(self) -> np.ndarray:
        assert self._rows.slots_on_host is not None
        return self._rows.slots_on_host

    def _owners_of(self, rows: np.ndarray) -> dict[int, int]:
        """By row, the number of its request."""
        return dict(zip(rows.tolist(), self._rows.owners[rows].tolist()))

    def _drop_if_dead(self) -> None:
        """Drops the prefix if all its requests have ended or moved to other slots."""
        rows = np.fromiter(self._owners, dtype=np.int64)
        kept = (self._table[rows, : len(self._slots)] == self._slots).all(axis=1)
        current = self._owners_of(rows[kept])
        self._owners = {row: owner for row, owner in self._owners.items() if current.get(row) == owner}
        if not self._owners:
            self.forget()

    def _knows(self, slots: np.ndarray) -> bool:
        """Whether the prefix begins with slots [S] int32; not if the step that should have expanded it failed."""
        return len(self._layers) >= self._num_layers and np.array_equal(self._slots[: len(slots)], slots)

    def _members(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Places of the rows that begin with the prefix of decodes, [M] int64."""
        if self.prefix is None:
            return np.empty(0, dtype=np.int64)
        length = len(self._slots)
        return np.flatnonzero((self._table[rows, :length] == self._slots).all(axis=1) & (positions >= length))

    def _best(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
        """Slots of the prefix with the most work in this step, if it is worth its expansion."""
        groups = [
            (len(group.members) * length, int(rows[group.members[0]]), length)
            for group in find_sharers(self._table, rows, positions, range(len(rows)))
            if len(group.members) >= LEAST_MEMBERS and (length := min(group.length, self._most) // BLOCK * BLOCK)
        ]
        if not groups:
            return None
        _, row, length = max(groups)
        return self._table[row, :length].copy()
