"""Parts of JSON Schema and regular expressions that xgrammar 0.2 enforces; all others are refused by name.

xgrammar accepts most of JSON Schema and ignores unknown parts. This is therefore a list of allowed parts: those that
`benchmarks.structured_output --backend xgrammar` finds enforced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moe_engine.structured_output.backend import GrammarError

ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$comment")
)
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
KEYWORDS: dict[str, frozenset[str]] = {
    "string": frozenset(("pattern", "format")),
    "integer": frozenset(BOUNDS),
    "number": frozenset(BOUNDS),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties")),
}
FORMATS = ("uuid",)
ALONE = ("const", "enum", "anyOf", "$ref")
"""Keywords with which other keywords are not enforced."""
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
DEFINITIONS = ("$defs", "definitions")
USE = "leave it out, or use --grammar-backend llguidance"
_REFERENCE = re.compile(r"#(/(\$defs|definitions)/[A-Za-z0-9_.-]+)?")
_REGEX = re.compile(
    r"(?:[A-Za-z0-9 _@#%&=:;,<>!~'-]|\\[.\-+*?^$|(){}\[\]]|\[[A-Za-z0-9 _-]+\]|\{[0-9]+(?:,[0-9]*)?\}|[+*|()])*"
)


def check_schema(schema: Any, where: str = "") -> None:
    """Raises GrammarError with the keyword that is not enforced and its place."""
    if schema is True:
        return
    if schema is False:
        raise GrammarError(f"{where or 'the schema'}: false allows no value")
    if not isinstance(schema, Mapping):
        raise GrammarError(f"{where or 'the schema'}: expected an object, got {schema!r:.40}")
    used = {key for key in schema if key not in ANNOTATIONS and key not in DEFINITIONS}
    for word in DEFINITIONS:
        for name, one in schema.get(word, {}).items():
            check_schema(one, f"{where}/{word}/{name}")
    for word in ALONE:
        if word in used:
            typed = word in ("const", "enum") and _has_type(schema, word)
            _refuse_others(used, {word, "type"} if typed else {word}, where)
            _check_alone(word, schema[word], where)
            return
    if used:
        _check_typed(schema, used, where)


def check_regex(pattern: str) -> None:
    """Raises GrammarError: the pattern has parts that are not enforced."""
    if not _REGEX.fullmatch(pattern):
        raise GrammarError(
            f"pattern {pattern!r:.80}: xgrammar enforces letters, digits, escapes, simple classes, groups, | and "
            f"repetitions; {USE}"
        )


def _check_typed(schema: Mapping[str, Any], used: set[str], where: str) -> None:
    """A schema whose keywords `used` belong to its type."""
    kind = schema.get("type")
    kinds: list[Any] = kind if isinstance(kind, list) else [kind]
    if not all(isinstance(one, str) and one in KEYWORDS for one in kinds):
        raise GrammarError(f"{where or 'the schema'}: needs a type with --grammar-backend xgrammar")
    _refuse_others(used, {"type", *KEYWORDS[kinds[0]]} if len(kinds) == 1 else {"type"}, where)
    if kinds == ["object"]:
        _check_object(schema, where)
    elif kinds == ["string"]:
        _check_string(schema, where)
    elif kinds == ["array"]:
        for i, one in enumerate(schema.get("prefixItems", [])):
            check_schema(one, f"{where}/prefixItems/{i}")
        if schema.get("items") is not False:
            check_schema(schema.get("items", True), f"{where}/items")


def _check_alone(word: str, value: Any, where: str) -> None:
    if word == "anyOf":
        for i, one in enumerate(value if isinstance(value, list) else []):
            check_schema(one, f"{where}/anyOf/{i}")
    elif word == "$ref" and not (isinstance(value, str) and _REFERENCE.fullmatch(value)):
        raise GrammarError(f"{where}/$ref: {value!r:.80} is not resolved by xgrammar; use simple names in $defs")


def _has_type(schema: Mapping[str, Any], word: str) -> bool:
    """Whether all values of `enum` or `const` have the schema's type, so that the type adds nothing."""
    values = schema[word] if word == "enum" else [schema[word]]
    kind = schema.get("type")
    return isinstance(values, list) and isinstance(kind, str) and all(TYPES.get(type(one)) == kind for one in values)


def _check_object(schema: Mapping[str, Any], where: str) -> None:
    properties = schema.get("properties", {})
    for name, one in properties.items():
        if not name.isprintable() or any(char in name for char in '"\\'):
            raise GrammarError(f"{where}/properties: the name {name!r:.40} is not enforced by xgrammar; {USE}")
        check_schema(one, f"{where}/properties/{name}")
    if set(schema.get("required", [])) - set(properties):
        raise GrammarError(f"{where}/required: xgrammar enforces names in properties only; {USE}")
    rest = schema.get("additionalProperties", True)
    if rest is not False and properties:
        raise GrammarError(f"{where}: additionalProperties must be false next to properties with xgrammar; {USE}")
    if rest is not False:
        check_schema(rest, f"{where}/additionalProperties")


def _check_string(schema: Mapping[str, Any], where: str) -> None:
    _refuse_others({"pattern", "format"} & set(schema), {"pattern" if "pattern" in schema else "format"}, where)
    if "format" in schema and schema["format"] not in FORMATS:
        raise GrammarError(f"{where}/format: {schema['format']!r:.40} is not enforced by xgrammar; {USE}")
    pattern = schema.get("pattern")
    if pattern is None:
        return
    if not isinstance(pattern, str) or not (pattern.startswith("^") and pattern.endswith("$")):
        raise GrammarError(f"{where}/pattern: xgrammar enforces patterns with ^ and $ only; {USE}")
    inner = pattern[1:-1]
    if "|" in inner and not re.fullmatch(r"\([^()]*\)", inner):
        raise GrammarError(f"{where}/pattern: {pattern!r:.80} has alternatives that are not one group; {USE}")
    check_regex(inner)


def _refuse_others(used: set[str], known: set[str], where: str) -> None:
    for word in sorted(used - known):
        raise GrammarError(f"{where}/{word} is not enforced by xgrammar next to {', '.join(sorted(known))}; {USE}")
