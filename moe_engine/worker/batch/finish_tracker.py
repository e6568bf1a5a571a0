"""Tracks on the worker which rows have finished, before the scheduler gets the result.

With a step in flight, a request that has just ended is planned once more. In a plain decode the waste is small; a step
with drafts costs several times as much, so the worker leaves such rows out. The conditions must equal the scheduler's:
an end token after min_new_tokens, or the length.

Legend: D decodes, K max new tokens of a row in a step.
"""

from __future__ import annotations

import numpy as np

from moe_engine.types import NewRow

_NO_END = np.iinfo(np.int64).max


class FinishTracker:
    """`ended[row]` for every row."""

    def __init__(self, max_rows: int) -> None:
        self.ended = np.zeros(max_rows, dtype=bool)
        self._max_length = np.full(max_rows, _NO_END, dtype=np.int64)
        self._ids: list[frozenset[int]] = [frozenset()] * max_rows
        self._first = np.zeros(max_rows, dtype=np.int64)  # position from which an end token ends the row
        self._all_ids: set[int] = set()

    def enter(self, new: NewRow) -> None:
        row, sampling = new.row, new.sampling
        ids = frozenset() if sampling.ignore_eos else new.eos_token_ids | frozenset(sampling.stop_token_ids)
        self.ended[row] = False
        self._max_length[row] = _NO_END if new.max_length is None else new.max_length
        self._ids[row] = ids
        self._first[row] = new.num_prompt + sampling.min_new_tokens
        self._all_ids |= ids

    def note(self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Adds counts[d] new tokens of tokens [D, K] to rows [D], the first at positions[d]."""
        self.ended[rows] |= positions + counts >= self._max_length[rows]
        listed = tokens.tolist()
        if self._all_ids.isdisjoint(token for some in listed for token in some):
            return
        for d, row in enumerate(rows.tolist()):
            fresh = listed[d][max(0, int(self._first[row] - positions[d])) : int(counts[d])]
            if not self._ids[row].isdisjoint(fresh):
                self.ended[row] = True
