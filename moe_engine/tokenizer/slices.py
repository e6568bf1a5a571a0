"""Splits a long text into slices whose tokens, concatenated, equal those of the whole text.

The tokenizers library needs some hundred bytes per token of a text, and holds the GIL while it returns the ids. The
size of a slice bounds both. A text is split between two words or after a line break, and only where the tokenizer gives
the same tokens for both sides separately as together. Vocabularies that prepend a space to every text have no such
place: their texts are not split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from moe_engine.errors import InputError

SLICE_CHARS = 2**16
"""Longer texts are split."""
MAX_UNCUT_CHARS = 2**22
"""Longest unsplittable stretch that is tokenized: about 2 GB of memory."""

WINDOW_CHARS = 128
"""Characters on each side of a split that are tokenized to check it."""
TRIES = 4
"""Split candidates tried near the end of a slice."""

_PLACE = re.compile(r"(?<=\w)(?= \w)|(?<=\n)(?=\w)")

Encode = Callable[[list[str]], list[list[int]]]


def slices(text: str, encode: Encode) -> Iterator[str]:
    """The text in pieces of about `SLICE_CHARS` characters.

    Args:
        encode: tokenizes texts without special tokens at either end.

    Raises:
        InputError: 413, a stretch of more than `MAX_UNCUT_CHARS` characters cannot be split.
    """
    start, end = 0, SLICE_CHARS
    while end < len(text):
        cut = _cut(text, end - SLICE_CHARS // 2, end, encode)
        if cut is not None:
            yield text[start:cut]
            start, end = cut, cut + SLICE_CHARS
            continue
        end += SLICE_CHARS // 2
        if end - start > MAX_UNCUT_CHARS:
            break
    if len(text) - start > MAX_UNCUT_CHARS:
        raise InputError(
            f"a stretch of more than {MAX_UNCUT_CHARS} characters of the text cannot be split for this model's "
            "tokenizer; send it in parts",
            status=413,
        )
    yield text[start:]


def groups(texts: list[str]) -> Iterator[list[str]]:
    """The texts in order, short ones grouped up to `SLICE_CHARS` characters, each longer one alone."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > SLICE_CHARS:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group


def _cut(text: str, low: int, high: int, encode: Encode) -> int | None:
    """The last valid split position in text[low:high], or None."""
    places = [match.start() for match in _PLACE.finditer(text, low, high)]
    for place in places[: -TRIES - 1 : -1]:
        left, right = text[max(0, place - WINDOW_CHARS) : place], text[place : place + WINDOW_CHARS]
        whole, *halves = encode([left + right, left, right])
        if whole == halves[0] + halves[1]:
            return place
    return None
