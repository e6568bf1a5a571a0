"""Visible text of one output: detokenized, special tokens skipped, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence, Set

from moe_engine.tokenizer.stop import StopMatcher
from moe_engine.tokenizer.stop_regex import RegexMatcher
from moe_engine.tokenizer.tokenizer import Tokenizer

_NOTHING: frozenset[int] = frozenset()


class TextAssembler:
    """Converts tokens to text. Once `matched` is set, the output ends at the token where `push` stopped.

    Args:
        stops: stop strings. A stop string that equals a special token, skipped in the text, still stops at that token.
        patterns: stop patterns; the output ends with the match, which is never cut off.
        trim: whether the stop string is cut off.
        keep: special tokens shown even if the others are skipped.
    """

    __slots__ = ("_detokenizer", "_matcher", "_regex", "_special_stop", "_special_stops", "push_plain")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: tuple[str, ...] = (),
        patterns: tuple[str, ...] = (),
        trim: bool = True,
        skip_special_tokens: bool = True,
        keep: Set[int] = _NOTHING,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens, keep, prompt_ids)
        self.push_plain = self._detokenizer.push
        """`push` without stop strings and patterns: only the text."""
        self._matcher = StopMatcher(stops, trim=trim) if stops else None
        self._regex = RegexMatcher(patterns) if patterns else None
        self._special_stops: dict[int, str] = {}
        self._special_stop: str | None = None
        for stop in stops:
            token = tokenizer.token_id(stop)
            if token is not None and token in tokenizer.special_ids and skip_special_tokens and token not in keep:
                self._special_stops[token] = stop

    @property
    def matched(self) -> str | None:
        """The stop string or pattern found, or None."""
        if self._special_stop is not None:
            return self._special_stop
        if self._matcher is not None and self._matcher.matched is not None:
            return self._matcher.matched
        return self._regex.matched if self._regex is not None else None

    def push(self, ids: Sequence[int]) -> tuple[str, int]:
        """Adds tokens; returns the new visible text and the number of tokens used: fewer if a stop was found."""
        matcher, regex = self._matcher, self._regex
        if matcher is None and regex is None:
            return self._detokenizer.push(ids), len(ids)
        text = ""
        for used, token in enumerate(ids, 1):
            if token in self._special_stops:
                text += self.flush()
                if self.matched is None:
                    self._special_stop = self._special_stops[token]
                return text, used
            piece = self._detokenizer.push((token,))
            if regex is not None:
                piece = regex.push(piece)
            text += piece if matcher is None else matcher.push(piece)
            if self.matched is not None:
                # of a pattern; after a stop string nothing is held back
                return text if matcher is None else text + matcher.flush(), used
        return text, len(ids)

    def flush(self) -> str:
        """Text held back for a possible stop string or incomplete character; call after the last token."""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return rest
        return self._matcher.push(rest) + self._matcher.flush()
