"""max_thinking_tokens: after this number of reasoning tokens only the tag that ends the reasoning is allowed."""

from __future__ import annotations

import numpy as np

from moe_engine.structured_output.mask_batch import FilledAtOnce

BEFORE, ENDED = -1, -2
"""States in addition to the number of reasoning tokens: no token yet, and after the reasoning."""


class ThinkingBudget(FilledAtOnce):
    """Implements `late_masks.PositionMasks` for the outputs of one request.

    Args:
        start: the tag that begins a reasoning as the first token; None: the output begins inside the reasoning.
        end: the tag that ends it.
    """

    def __init__(self, limit: int, start: int | None, end: int) -> None:
        self._limit, self._start, self._end = limit, start, end
        self._states = [0 if start is None else BEFORE]
        """Before the first token, and after each."""

    def accept(self, token: int) -> None:
        state = self._states[-1]
        if state == BEFORE:
            state = 0 if token == self._start else ENDED
        elif state != ENDED:
            state = ENDED if token == self._end else state + 1
        self._states.append(state)

    def fill(self, mask: np.ndarray) -> None:
        if self._states[-1] >= self._limit:
            word, bit = self._end >> 5, np.uint32(1 << (self._end & 31))
            allowed = mask[word] & bit
            mask[:] = 0
            mask[word] = allowed

    def rollback(self, count: int) -> None:
        if count:
            del self._states[-count:]
