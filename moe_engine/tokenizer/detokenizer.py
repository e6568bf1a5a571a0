"""Incremental detokenization with constant cost per token.

A character may span several tokens; its bytes are held back until it is complete. Two methods:

- byte-level vocabularies (DeepSeek, Qwen, Llama 3): tokens are byte strings; an incremental UTF-8 decoder is exact;
- all others (SentencePiece style): the text of a short window of tokens, minus that of its older half.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol

MAX_PENDING_TOKENS = 8
"""A window that ends in an incomplete character is emitted as is after this many tokens: it is invalid."""

PROMPT_TAIL_TOKENS = 5
"""Prompt tokens used as left context of a window, so that a leading space of the output is kept."""


class Detokenizer(Protocol):
    def push(self, ids: Sequence[int]) -> str:
        """Adds tokens; returns the characters that they complete."""

    def flush(self) -> str:
        """Remaining text after the last token: an incomplete character as U+FFFD, or nothing."""


class ByteTable(Protocol):
    """Byte strings of tokens, by id."""

    @property
    def texts(self) -> Mapping[int, str | None]:
        """Text of a token whose bytes are whole characters, else None."""

    def __getitem__(self, token_id: int) -> bytes: ...


class ByteDetokenizer:
    """For vocabularies whose tokens are byte strings."""

    __slots__ = ("_decoder", "_is_between", "_skip", "_table")

    def __init__(self, table: ByteTable, skip: Set[int]) -> None:
        self._table = table
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_between = True
        """True if no bytes of an incomplete character are pending."""

    def push(self, ids: Sequence[int]) -> str:
        table, skip = self._table, self._skip
        if self._is_between and len(ids) == 1 and ids[0] not in skip:  # the usual case of a stream
            text = table.texts[ids[0]]
            if text is not None:
                return text
        text = self._decoder.decode(b"".join([table[i] for i in ids if i not in skip]))
        self._is_between = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        self._is_between = True
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For any vocabulary. `decode` converts a few ids to text; `prompt_tail`: the prompt's last tokens."""

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
