"""Cuts a long text into slices that give the same tokens one by one as the whole text does.

The tokenizers library keeps some hundred bytes for each token of a text it works on, and holds Python's interpreter
lock while it hands the ids out. The size of a slice bounds both. A text is cut between two words or behind a line
break, and only where the tokenizer gives the same tokens for both sides of the cut as for the text around it. Some
vocabularies put a blank in front of every text: they have no place to cut, and their texts stay whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from moe_engine.errors import InputError

SLICE_CHARS = 2**16
"""A longer text is cut."""
MAX_UNCUT_CHARS = 2**22
"""Longest stretch without a place to cut that is tokenized: about 2 GB of memory."""

WINDOW_CHARS = 128
"""Characters on each side of a cut that the tokenizer is asked about."""
TRIES = 4
"""Places tried near the end of a slice."""

_PLACE = re.compile(r"(?<=\w)(?= \w)|(?<=\n)(?=\w)")

Encode = Callable[[list[str]], list[list[int]]]


def slices(text: str, encode: Encode) -> Iterator[str]:
    """The text in pieces of about `SLICE_CHARS` characters.

    Args:
        encode: gives the tokens of texts, without special tokens at either end.

    Raises:
        InputError: 413, a stretch of more than `MAX_UNCUT_CHARS` characters has no place to cut.
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
            f"a stretch of more than {MAX_UNCUT_CHARS} characters of the text has no place where this model's "
            "tokenizer could cut it; send it in parts",
            status=413,
        )
    yield text[start:]


def groups(texts: list[str]) -> Iterator[list[str]]:
    """The texts in order, short ones together up to `SLICE_CHARS` characters, each longer one alone."""
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
    """The last good place in text[low:high], or None."""
    places = [match.start() for match in _PLACE.finditer(text, low, high)]
    for place in places[: -TRIES - 1 : -1]:
        left, right = text[max(0, place - WINDOW_CHARS) : place], text[place : place + WINDOW_CHARS]
        whole, *halves = encode([left + right, left, right])
        if whole == halves[0] + halves[1]:
            return place
    return None
