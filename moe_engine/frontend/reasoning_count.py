"""Reasoning tokens of an output, for `meta_info`: as SGLang, of requests whose output begins with reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from moe_engine.tokenizer.tokenizer import Tokenizer
from moe_engine.types.constraint import FreeReasoning


class ReasoningCount:
    """Args: end: id of the tag that ends the reasoning; start: of the first token, -1 if the prompt has it."""

    def __init__(self, start: int, end: int) -> None:
        self._start, self._end = start, end
        self._num_searched = 0
        self._found: int | None = None

    def of(self, output_ids: Sequence[int]) -> int:
        """Tokens up to and including the end tag, all of them without it. Each call searches the new tokens only."""
        if self._start >= 0 and output_ids[:1] != [self._start]:
            return 0
        if self._found is None:
            try:
                self._found = output_ids.index(self._end, self._num_searched) + 1
            except ValueError:
                self._num_searched = len(output_ids)
        return len(output_ids) if self._found is None else min(self._found, len(output_ids))


def count_of(reasoning: FreeReasoning | None, tokenizer: Tokenizer | None) -> ReasoningCount | None:
    """None: no reasoning, or tags that are not one token each."""
    if reasoning is None or tokenizer is None:
        return None
    start, end = -1 if reasoning.inside else tokenizer.token_id(reasoning.start), tokenizer.token_id(reasoning.end)
    return None if start is None or end is None else ReasoningCount(start, end)
