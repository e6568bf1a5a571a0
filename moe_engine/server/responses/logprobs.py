"""Log-probabilities of the texts that a parser makes of an output.

A parser removes tags and may hold text back, so the tokens of a text are found by their bytes, in the order of the
output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from moe_engine.frontend.logprob_format import Columns


class TextLogprobs:
    """
    Args:
        bytes_of: the bytes of a token in the middle of a text; tokens without bytes belong to no text.
        end_tag: the tag that ends a reasoning, or "".
    """

    def __init__(self, bytes_of: Callable[[int], bytes], end_tag: str) -> None:
        self._bytes_of = bytes_of
        self._end_tag = end_tag
        self._kind = ""
        self._bytes = b""
        self._tokens: deque[tuple[int, Any]] = deque()
        """Number of bytes and entry of each token in `_bytes`; the entry is None once it was returned."""

    def add(self, token_ids: Sequence[int], columns: Columns) -> None:
        """New tokens with their entries, as `ChatLogprobs.render` makes them."""
        texts = [self._bytes_of(token) for token in token_ids]
        self._bytes += b"".join(texts)
        self._tokens.extend(zip(map(len, texts), map(msgspec.Raw, columns[0] if columns else ())))

    def of(self, kind: str, text: str) -> list[Any]:
        """The entries of the tokens of the next text of a part: `kind` is that of `Part`. Empty if the text is not that
        of tokens."""
        before, self._kind = self._kind, kind
        if kind == "call":  # written again by the parser
            return []
        tag = self._bytes.find(self._end_tag.encode())
        blank = not before and not self._bytes[: max(tag, 0)].strip() and not text.lstrip().startswith(self._end_tag)
        if kind == "text" and (before == "reasoning" or blank):  # a reasoning of spaces is no part
            self._take(tag, self._end_tag)
        find = self._bytes.rfind if before == "call" else self._bytes.find  # after the call's arguments
        return self._take(find(text.encode()), text)

    def _take(self, begin: int, text: str) -> list[Any]:
        """The entries of the tokens of `text`, which begins at this byte; drops all bytes up to its end."""
        found: list[Any] = []
        end = begin + len(text.encode())
        if begin < 0 or end == 0:
            return found
        self._bytes = self._bytes[end:]
        at = 0
        while self._tokens and at < end:
            size, entry = self._tokens.popleft()
            at += size
            if size and at > begin and entry is not None:
                found.append(entry)
            if at > end:
                self._tokens.appendleft((at - end, None))
        return found
