"""Errors of grammars name the place: characters of expressions, lines of grammars, JSON pointers into schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from moe_engine.structured_output.backend import GrammarBackend, GrammarError
from moe_engine.types.constraint import Constraint
from tests.structured_output.test_llguidance_backend import backend, tokenizer

__all__ = ["backend", "tokenizer"]  # fixtures

TEXTS = [
    ("regex", "abc(d", "unclosed group at character 4 of the regular expression 'abc(d'"),
    ("regex", "  12[a-", "unclosed character class at character 5 of"),
    ("regex", "a\nb{3,1}", "invalid repetition count range"),
    ("grammar", "start: x\nx: y\n", 'line 2, column 4: unknown name: "y"'),
    ("grammar", 'root ::= "a" b\n', "line 1, column 14: Rule 'b' not found"),
    ("grammar", 'root ::= "b"\n  | a-b "b" b # b\na-b ::= "c"', "line 2, column 13: Rule 'b' not found"),
    ("grammar", 'root ::= ("a"\nx ::= "b"', "line 2, column 3: Expected ')'"),
    ("grammar", 'root ::= "ab\\q"', "column 14: Invalid escape sequence"),
    ("grammar", "root ::= (", "line 1"),
    ("grammar", 'root ::= x\n\n\nx ::= "a"{3,1}', "range end must be >= start, got (3, 1)"),
    ("grammar", 'root ::= root "a"', "no text matches it"),
    ("json_schema", '{"type": "number", "minimum": "x"}', "at /minimum: Expected a number"),
    ("json_schema", '{"not": {"type": "null"}}', 'at /not: not enforced, and therefore refused: "not"'),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 2}', "minimum (5) is greater than maximum (2)"),
    (
        "json_schema",
        '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "x"}}, "$ref": "#/$defs/a"}',
        "at /$defs/b/type: ",
    ),
    (
        "json_schema",
        '{"properties": {"a": {"items": {"$ref": "#/properties/b"}}, "b": {"type": "x"}}}',
        "at /properties/b/type: ",
    ),
    ("json_schema", '{"properties": {"a": true, "b": 5}}', "at /properties/b: "),
]
"""Kind, source and words of the reason; a line is that of the client's text, or it is not named."""


def reason(backend: GrammarBackend, kind: str, source: str) -> str:
    with pytest.raises(GrammarError) as found:
        backend.compile(Constraint(kind, source))
    text = str(found.value)
    assert "\n" not in text and len(text) <= 500
    return text


@pytest.mark.parametrize(("kind", "source", "words"), TEXTS, ids=[source for _, source, _ in TEXTS])
def test_places_in_texts(backend: GrammarBackend, kind: str, source: str, words: str) -> None:
    assert words in reason(backend, kind, source)


WRONG: list[tuple[Any, str]] = [
    ({"not": {}}, "not"),
    ({"type": "text"}, "type"),
    ({"type": "string", "pattern": "ab(c"}, "pattern"),
    ({"uniqueItems": True}, "uniqueItems"),
]
"""Schemas with the keyword at fault."""


def test_places_in_schemas(backend: GrammarBackend) -> None:
    """An invalid part inside random properties, lists and definitions."""
    for _ in range(20):
        part, word = random.choice(WRONG)
        pointer = f"/{word}"
        for _ in range(random.randint(1, 5)):
            form = random.randrange(4)
            name = random.choice(["a", "b/c", "d~e", "é"])
            if form == 0:
                part = {"type": "object", "properties": {"first": {"type": "integer"}, name: part}}
                pointer = f"/properties/{name.replace('~', '~0').replace('/', '~1')}{pointer}"
            elif form == 1:
                part, pointer = {"type": "array", "items": part}, f"/items{pointer}"
            elif form == 2:
                part, pointer = {"anyOf": [{"type": "integer"}, part]}, f"/anyOf/1{pointer}"
            else:
                part = {"$defs": {"n": {"type": "null"}}, "type": "object", "additionalProperties": part}
                pointer = f"/additionalProperties{pointer}"
        assert reason(backend, "json_schema", json.dumps(part)).startswith(f"at {pointer}: "), part
