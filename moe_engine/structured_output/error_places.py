"""Locates errors in grammars: positions in regular expressions and Lark texts, JSON pointers into schemas."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

MAX_MESSAGE = 400
MAX_TRIALS = 64
"""Max parts of an invalid schema that are compiled to find the invalid one."""
_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONE = ("items", "additionalProperties")
_INDENT = "    "
_CARET = re.compile(r"( *)(\^+)\s*")
_LARK_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_QUOTED = re.compile(r"\d+ \| .*|\^+|")


def readable(message: str) -> str:
    """A library's message on one line, with the position in words, without the grammar that it quotes."""
    lines = message.splitlines()
    for i in range(1, len(lines)):
        caret = _CARET.fullmatch(lines[i])
        reason = next((line[7:] for line in lines[i:] if line.startswith("error: ")), None)
        if caret and reason is not None and lines[i - 1].startswith(_INDENT):
            at = len(caret[1]) - len(_INDENT) + 1
            return f"{reason} at character {at} of the regular expression {lines[i - 1][4:]!r:.160}"[:MAX_MESSAGE]
    kept = [line.strip() for line in lines if not _QUOTED.fullmatch(line.strip())]
    text = _LARK_PLACE.sub(r"line \1, column \2: ", " ".join(kept))
    return text[:MAX_MESSAGE] or "unknown reason"


def without_line(reason: str) -> str:
    """A reason without its line and column, which refer to a grammar that the client has not written."""
    return re.sub(r"^line \d+, column \d+: ", "", reason)


def wrong_part(schema: Any, problem: Callable[[Any], str | None]) -> tuple[str, str] | None:
    """JSON pointer and reason of the innermost part of a schema that is invalid by itself; None if only the whole
    schema is invalid.

    Args:
        problem: the reason against a schema, or None.
    """
    found, pointer, trials = None, "", 0
    shared = {word: schema[word] for word in ("$defs", "definitions") if isinstance(schema, dict) and word in schema}
    going = True
    while going:
        going = False
        for key, part in _parts(schema):
            trials += 1
            if trials > MAX_TRIALS:
                return found
            reason = problem({**shared, **part} if isinstance(part, dict) and not key.startswith("/$defs") else part)
            if reason is not None:
                schema, pointer, going = part, pointer + key, True
                found = pointer, reason
                break
    return found


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, dict):
        return
    for word in _OF_SCHEMAS:
        if isinstance(schema.get(word), dict):
            for name, part in schema[word].items():
                yield f"/{word}/{name.replace('~', '~0').replace('/', '~1')}", part
    for word in _LISTS:
        if isinstance(schema.get(word), list):
            for i, part in enumerate(schema[word]):
                yield f"/{word}/{i}", part
    for word in _ONE:
        if isinstance(schema.get(word), dict):
            yield f"/{word}", schema[word]
