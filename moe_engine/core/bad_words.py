"""bad_words of several tokens: the last token of a sequence is forbidden after the others (vLLM's meaning). Sequences
of one token need no state: the worker forbids them everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_engine.structured_output.mask_batch import FilledAtOnce


class BadWords(FilledAtOnce):
    """Implements `late_masks.PositionMasks` for the outputs of one request."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._words = [(list(ids[:-1]), ids[-1]) for ids in sequences if len(ids) > 1]
        self._tokens: list[int] = []

    def accept(self, token: int) -> None:
        self._tokens.append(token)

    def fill(self, mask: np.ndarray) -> None:
        tokens = self._tokens
        for before, last in self._words:
            if tokens[-len(before) :] == before:
                mask[last >> 5] &= ~np.uint32(1 << (last & 31))

    def rollback(self, count: int) -> None:
        if count:
            del self._tokens[-count:]
