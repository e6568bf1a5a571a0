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
_QUOTED = re.compile(r"\d+ \|.*|\^+|")
_PLAINER = (
    (re.compile(r"^Unimplemented keys: \[(.*)\]$"), r"not enforced, and therefore refused: \1"),
    (re.compile(r"^Expected f64\b"), "Expected a number"),
    (re.compile(r"^NoExtensionBias\b.*"), "no text matches it"),
    (re.compile(r" *<non-verbose/>"), ""),
)
"""llguidance's words, and those that a client understands."""


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
    for theirs, plain in _PLAINER:
        text = theirs.sub(plain, text)
    return text[:MAX_MESSAGE] or "unknown reason"


def without_line(reason: str) -> str:
    """A reason without its line and column, which refer to a grammar that the client has not written."""
    return re.sub(r"^line \d+, column \d+: ", "", reason)


def wrong_part(schema: Any, reason: str, problem: Callable[[Any], str | None]) -> str:
    """JSON pointer of the keyword, in the innermost part of a schema, that is invalid for this reason; "" if none is
    found.

    Args:
        problem: the reason against a schema, or None.
    """
    shared = {word: schema[word] for word in ("$defs", "definitions") if isinstance(schema, dict) and word in schema}
    anything = {word: dict.fromkeys(part, True) for word, part in shared.items() if isinstance(part, dict)}
    trials = 0

    def fails(part: Any, definitions: dict[str, Any]) -> bool:
        nonlocal trials
        if not isinstance(part, (dict, bool)):
            return True  # no schema
        trials += 1
        return trials <= MAX_TRIALS and problem({**definitions, **part} if isinstance(part, dict) else part) == reason

    pointer, part = "", schema
    while True:
        parts = list(_parts(part))
        # first with definitions that allow anything: a part is not blamed for one that it refers to
        tries = ((key, one) for known in (anything, shared) for key, one in parts if fails(one, known))
        inner = next(tries, None)
        if inner is None:
            break
        pointer, part = pointer + inner[0], inner[1]
    for word in sorted(part, key="type".__eq__) if isinstance(part, dict) else ():
        if not fails({key: value for key, value in part.items() if key != word}, shared) and trials <= MAX_TRIALS:
            return f"{pointer}/{_escaped(word)}"
    return pointer


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, dict):
        return
    for word in _OF_SCHEMAS:
        if isinstance(schema.get(word), dict):
            for name, part in schema[word].items():
                yield f"/{word}/{_escaped(name)}", part
    for word in _LISTS:
        if isinstance(schema.get(word), list):
            for i, part in enumerate(schema[word]):
                yield f"/{word}/{i}", part
    for word in _ONE:
        if isinstance(schema.get(word), dict):
            yield f"/{word}", schema[word]


def _escaped(name: str) -> str:
    """A name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
