"""Parts of schemas that llguidance compiles and does not enforce: rewritten if outputs stay valid, else refused.

Both were found by `benchmarks.structured_output`, which shows whether a new version still needs them.

- A class of a pattern with control characters and without `"` or `\\` also allows `\\"` and `\\\\`, as escapes. A
  negated class then excludes control characters too: outputs match, and contain none of them.
- A number between an excluded integer and a bound in the same unit (above 0, at most 0.25) may be that integer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from moe_engine.structured_output.backend import GrammarError

NAMED = ("properties", "$defs", "definitions", "dependentSchemas")
"""Keywords with schemas by name; a name may be that of a keyword."""
VALUES = ("enum", "const", "default", "examples")
"""Keywords whose content is not a schema."""
CONTROL = r"\x00-\x1f"
_CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
MAX_PARTS = 64


def enforceable(schema: Any) -> Any:
    """A schema with the same keywords that llguidance enforces.

    Raises:
        GrammarError: llguidance does not enforce a part.
    """
    if schema is False:
        raise GrammarError("the schema false allows no value")
    if schema is not True and not isinstance(schema, dict):
        raise GrammarError(f"expected a JSON object, got {schema!r:.80}")
    return {} if schema is True else _rewritten(schema, schema)  # options are fields of an object


def _rewritten(schema: Any, root: Any) -> Any:
    if isinstance(schema, list):
        return [_rewritten(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    _check_number(schema, root)
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            found[key] = _pattern(value)
        elif key == "patternProperties" and isinstance(value, dict):
            found[key] = {_pattern(name): _rewritten(one, root) for name, one in value.items()}
        elif key in NAMED and isinstance(value, dict):
            found[key] = {name: _rewritten(one, root) for name, one in value.items()}
        else:
            found[key] = value if key in VALUES else _rewritten(value, root)
    return found


def _pattern(pattern: str) -> str:
    return _CLASS.sub(lambda match: _class(match[0], pattern), pattern)


def _class(text: str, pattern: str) -> str:
    """A class of a pattern, or one escaped character."""
    if not text.startswith("["):
        return text
    try:
        has = re.compile(text, re.ASCII)
    except re.error:
        has = None  # a class unknown to Python, such as \\p{L}
    if has is not None and (not has.match("\x00") or (has.match('"') and has.match("\\"))):
        return text
    if text.startswith("[^"):
        return f"{text[:-1]}{CONTROL}]"
    if has is None:
        return text
    raise GrammarError(
        f'pattern {pattern!r:.80}: the class {text!r:.40} has control characters and not both " and \\: it is not '
        "enforced; leave out the control characters"
    )


def _check_number(schema: Mapping[str, Any], root: Any) -> None:
    low = high = None  # (bound, excluded)
    for part in _parts(schema, root):
        for word, excluded in (("minimum", False), ("exclusiveMinimum", True)):
            if _is_number(part.get(word)):
                low = max(low or (-math.inf, False), (part[word], excluded))
        for word, excluded in (("maximum", False), ("exclusiveMaximum", True)):
            if _is_number(part.get(word)):
                high = min(high or (math.inf, True), (part[word], excluded), key=lambda one: (one[0], not one[1]))
    if low is None or high is None or math.trunc(low[0]) != math.trunc(high[0]) or low[0] == high[0]:
        return
    for word, (bound, excluded), other in (("exclusiveMinimum", low, high), ("exclusiveMaximum", high, low)):
        if excluded and bound == math.trunc(bound):
            usual = word.removeprefix("exclusive").lower()
            raise GrammarError(f"{word} {bound} is not enforced with the other bound {other[0]}; use {usual}")


def _parts(schema: Mapping[str, Any], root: Any) -> Iterator[Mapping[str, Any]]:
    """The schema, and the further schemas that a value must match (allOf, references)."""
    waiting: list[Any] = [schema]
    for count, part in enumerate(waiting):
        if not isinstance(part, Mapping) or count > MAX_PARTS:
            continue
        yield part
        if isinstance(part.get("allOf"), list):
            waiting += part["allOf"]
        if isinstance(part.get("$ref"), str):
            waiting.append(_target(part["$ref"], root))


def _target(reference: str, root: Any) -> Any:
    """The schema at a pointer of the same document, or None."""
    if not reference.startswith("#"):
        return None
    found = root
    for step in unquote(reference[1:]).split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
