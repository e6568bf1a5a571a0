"""Free reasoning before the constrained part: a matcher around the grammar's own.

The end of the reasoning is a state of the matcher, so it may be anywhere in a chain or tree of drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_engine.structured_output.backend import Matcher
from moe_engine.structured_output.mask_batch import MaskBatch
from moe_engine.structured_output.vocabulary import Vocabulary
from moe_engine.types.constraint import FreeReasoning


@dataclass(frozen=True)
class EndTag:
    """`overruns[k]`: mask of the tokens that, with k bytes of the tag matched, complete it before their last byte, and
    of the end tokens: forbidden, so that the constrained part starts at the beginning of a token."""

    text: bytes
    token: int | None
    overruns: list[np.ndarray]


class EndTags:
    """The end tags of a vocabulary, computed once each."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._tags: dict[str, EndTag] = {}

    def get(self, tag: str) -> EndTag:
        if tag not in self._tags:
            self._tags[tag] = _end_tag(self.vocabulary, tag)
        return self._tags[tag]


class ReasoningMatcher:
    """Implements `PositionMasks`: all tokens except end tokens until the end tag, then the tokens that `after`
    allows."""

    def __init__(self, reasoning: FreeReasoning, tags: EndTags, after: Matcher) -> None:
        self._tag = tags.get(reasoning.end)
        self._start = None if reasoning.inside else tags.vocabulary.tokenizer.token_id(reasoning.start)
        self._tokens = tags.vocabulary.tokens
        self._after = after
        self._states: list[int] = []
        """Bytes of the end tag matched after each token of the reasoning."""
        self._inside = reasoning.inside
        self._num_after = 0

    @property
    def _reasons(self) -> bool:
        states = self._states
        return (self._inside or bool(states)) and not (states and states[-1] == len(self._tag.text))

    @property
    def _may_begin(self) -> bool:
        """Whether the next token may be the start tag."""
        return self._start is not None and not self._num_after and not self._states

    def accept(self, token: int) -> None:
        if self._reasons:
            before = self._states[-1] if self._states else 0
            self._states.append(_advance(self._tag, before, token, self._tokens))
        elif self._may_begin and token == self._start:
            self._states.append(0)
        else:
            self._after.accept(token)
            self._num_after += 1

    def fill(self, mask: np.ndarray) -> None:
        if self._reasons:
            mask &= ~self._tag.overruns[self._states[-1] if self._states else 0]
            return
        self._after.fill(mask)
        if self._may_begin:
            assert self._start is not None
            mask[self._start >> 5] |= np.uint32(1 << (self._start & 31))

    def fill_later(self, batch: MaskBatch, place: int) -> None:
        if self._reasons or self._may_begin:
            self.fill(batch.tables[place])
        else:
            self._after.fill_later(batch, place)

    def check(self) -> None:
        self._after.check()

    def forced(self) -> list[int]:
        return [] if self._reasons or self._may_begin else self._after.forced()

    def rollback(self, count: int) -> None:
        behind = min(count, self._num_after)
        if behind:
            self._after.rollback(behind)
            self._num_after -= behind
        if count > behind:
            del self._states[behind - count :]


def _advance(tag: EndTag, state: int, token: int, tokens: list[bytes]) -> int:
    if token == tag.token:
        return len(tag.text)
    for byte in tokens[token]:
        state = _step(tag.text, state, byte)
    return state if tokens[token] else 0


def _step(text: bytes, state: int, byte: int) -> int:
    """The longest beginning of `text` that ends with this byte, after `state` matched ones. A whole match stays."""
    if state == len(text):
        return state
    seen = text[:state] + bytes([byte])
    return next(length for length in range(len(seen), -1, -1) if seen.endswith(text[:length]))


def _end_tag(vocabulary: Vocabulary, tag: str) -> EndTag:
    text = tag.encode()
    words = -(-len(vocabulary.tokens) // 32)
    last = text[-1]
    able = [i for i, token in enumerate(vocabulary.tokens) if last in token[:-1]]
    overruns = []
    for begin in range(len(text)):
        mask = np.zeros(words, dtype=np.uint32)
        for token in (*vocabulary.eos_ids, *able):
            if token in vocabulary.eos_ids or _overruns(text, begin, vocabulary.tokens[token]):
                mask[token >> 5] |= np.uint32(1 << (token & 31))
        overruns.append(mask)
    return EndTag(text, vocabulary.tokenizer.token_id(tag), overruns)


def _overruns(text: bytes, state: int, token: bytes) -> bool:
    for byte in token[:-1]:
        state = _step(text, state, byte)
    return state == len(text)
