"""Tokens to text, piece by piece, at a cost per token that does not grow with the sequence.

A character may be spread over several tokens; its bytes wait until it is whole. Two ways:

- byte-level vocabularies (DeepSeek, Qwen, Llama 3): tokens are byte strings; an incremental UTF-8 decoder is exact;
- all others (SentencePiece style): the text of a short window of tokens, minus that of its older half.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol

MAX_PENDING_TOKENS = 8
"""A window that ends in a broken character is shown as it is after this many tokens: it will never be mended."""

PROMPT_TAIL_TOKENS = 5
"""Prompt tokens given to a window as left context, so that a leading space of the answer survives."""


class Detokenizer(Protocol):
    def push(self, ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the characters they complete."""

    def flush(self) -> str:
        """What is left when no more tokens come: a broken character as U+FFFD, or nothing."""


class ByteDetokenizer:
    """For vocabularies whose tokens are byte strings. `table[id]` are the bytes of a token."""

    __slots__ = ("_decoder", "_skip", "_table")

    def __init__(self, table: Mapping[int, bytes], skip: Set[int]) -> None:
        self._table = table
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        table, skip = self._table, self._skip
        return self._decoder.decode(b"".join([table[i] for i in ids if i not in skip]))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For any vocabulary. `decode` turns a few ids into text; `prompt_tail` are the last tokens before the answer."""

    __slots__ = ("_before", "_decode", "_num_shown", "_skip", "_window")

    def __init__(self, decode: Callable[[list[int]], str], skip: Set[int], prompt_tail: Sequence[int] = ()) -> None:
        self._decode = decode
        self._skip = skip
        self._window = [i for i in prompt_tail if i not in skip]
        self._num_shown = len(self._window)
        self._before = decode(self._window) if self._window else ""

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push_one(i) for i in ids if i not in self._skip])

    def _push_one(self, token: int) -> str:
        window = self._window
        window.append(token)
        text = self._decode(window)
        num_pending = len(window) - self._num_shown
        if text.endswith("\ufffd") and num_pending < MAX_PENDING_TOKENS:
            return ""
        return self._show(text)

    def _show(self, text: str) -> str:
        piece = text[len(self._before) :]
        del self._window[: self._num_shown]
        self._num_shown = len(self._window)
        self._before = self._decode(self._window)
        return piece

    def flush(self) -> str:
        if len(self._window) == self._num_shown:
            return ""
        return self._show(self._decode(self._window))
