"""The visible text of one answer: tokens decoded, special tokens skipped, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence, Set

from moe_engine.tokenizer.stop import StopMatcher
from moe_engine.tokenizer.tokenizer import Tokenizer

_NOTHING: frozenset[int] = frozenset()


class TextAssembler:
    """Takes tokens, gives text. Once `matched` is set, the answer is over at the token `push` stopped at.

    Args:
        stops: stop strings. One that spells a special token that is skipped in the text still stops on that token.
        trim: whether the stop string is cut off.
        keep: special tokens shown even when the others are skipped.
    """

    __slots__ = ("_detokenizer", "_matcher", "_special_stop", "_special_stops")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: tuple[str, ...] = (),
        trim: bool = True,
        skip_special_tokens: bool = True,
        keep: Set[int] = _NOTHING,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens, keep, prompt_ids)
        self._matcher = StopMatcher(stops, trim=trim) if stops else None
        self._special_stops: dict[int, str] = {}
        self._special_stop: str | None = None
        for stop in stops:
            token = tokenizer.token_id(stop)
            if token is not None and token in tokenizer.special_ids and skip_special_tokens and token not in keep:
                self._special_stops[token] = stop

    @property
    def matched(self) -> str | None:
        """The stop string that was found."""
        if self._special_stop is not None:
            return self._special_stop
        return self._matcher.matched if self._matcher is not None else None

    def push(self, ids: Sequence[int]) -> tuple[str, int]:
        """Takes tokens; returns the new visible text and how many tokens were used: fewer when a stop was found."""
        if self._matcher is None:
            return self._detokenizer.push(ids), len(ids)
        text = ""
        for used, token in enumerate(ids, 1):
            if token in self._special_stops:
                text += self.flush()
                if self._matcher.matched is None:
                    self._special_stop = self._special_stops[token]
                return text, used
            text += self._matcher.push(self._detokenizer.push((token,)))
            if self._matcher.matched is not None:
                return text, used
        return text, len(ids)

    def flush(self) -> str:
        """Text held back for a stop string or an unfinished character, once no more tokens come."""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return rest
        return self._matcher.push(rest) + self._matcher.flush()
