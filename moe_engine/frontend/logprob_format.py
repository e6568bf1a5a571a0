"""Log-probabilities in the response: every packed block is rendered once, when it is sent to the client.

A format has one column per field of the response, with one item per token. The type of an item, Python object or JSON
fragment, depends on the format.

Legend: P tokens; at each of them K best tokens and J requested ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from moe_engine.types import PackedLogprobs

Columns = list[list[Any]]
"""Empty, or one list per field, each with one item per token."""


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """Log-probabilities of a request; see `types.LogprobSpec`."""

    start: int | None
    """First prompt position with a log-probability; None: outputs only."""
    top: int
    token_ids: tuple[int, ...]
    with_text: bool


class LogprobFormat(Protocol):
    """Format of one request's response."""

    def render(self, block: PackedLogprobs) -> Columns:
        """Items of a block's tokens."""

    def fields(self, columns: Columns) -> dict[str, Any]:
        """Name and value of each field, from the items of all its tokens."""


def extend(into: Columns, new: Columns) -> None:
    """Appends the items of `new` to `into`."""
    if not into:
        into.extend([] for _ in new)
    for column, items in zip(into, new):
        column += items


def joined(*parts: Columns) -> Columns:
    """A new `Columns` with the items of all parts."""
    whole: Columns = []
    for part in parts:
        extend(whole, part)
    return whole


def num_tokens(columns: Columns) -> int:
    return len(columns[0]) if columns else 0


def ids_of(data: bytes) -> list[int]:
    return memoryview(data).cast("i").tolist()


def floats_of(data: bytes) -> list[float]:
    values: Any = memoryview(data).cast("f").tolist()
    return values


def rows_of(flat: list[Any], count: int) -> list[list[Any]]:
    """Splits a flat list into `count` rows of equal length."""
    width = len(flat) // count if count else 0
    return [flat[i * width : (i + 1) * width] for i in range(count)]


class PythonLogprobs:
    """SGLang's ``meta_info`` as Python objects: an entry is [logprob, token id, text]; alternatives are a list of
    entries, or None if there are none.

    Args:
        token_text: text of a token; None: entries have no text.
    """

    def __init__(self, options: LogprobOptions, token_text: Callable[[int], str] | None) -> None:
        self._options = options
        self._text = token_text if options.with_text and token_text is not None else lambda token: None

    def render(self, block: PackedLogprobs) -> Columns:
        count = block.num_tokens
        values = floats_of(block.values)
        chosen = [self._entry(*pair) for pair in zip(ids_of(block.token_ids), values)]
        top = map(self._entry, ids_of(block.top_ids), floats_of(block.top))
        asked = map(self._entry, self._options.token_ids * count, floats_of(block.asked))
        alternatives = (
            [_alternatives(*pair) for pair in zip(rows_of(list(flat), count), values)] for flat in (top, asked)
        )
        return [chosen, *alternatives]

    def _entry(self, token: int, value: float) -> list[Any]:
        return [None if math.isnan(value) else value, token, self._text(token)]

    def fields(self, columns: Columns) -> dict[str, Any]:
        return named(self._options, [list(column) for column in columns] or [[], [], []])


def _alternatives(row: list[Any], value: float) -> list[Any] | None:
    return None if math.isnan(value) else row or None


def named(options: LogprobOptions, values: list[Any]) -> dict[str, Any]:
    """SGLang's fields for a request's options. `values`: chosen tokens, top tokens, requested tokens."""
    chosen, top, asked = values
    found = {"token_logprobs": chosen}
    if options.top:
        found["top_logprobs"] = top
    if options.token_ids:
        found["token_ids_logprobs"] = asked
    return found
