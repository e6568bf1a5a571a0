"""Errors of grammars name the place: characters of expressions, lines of grammars, JSON pointers into schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from moe_engine.structured_output.backend import GrammarBackend, GrammarError
from moe_engine.structured_output.constraint import Constraint
from tests.structured_output.test_llguidance_backend import backend, tokenizer

__all__ = ["backend", "tokenizer"]  # fixtures

TEXTS = [
    ("regex", "abc(d", "unclosed group at character 4 of the regular expression 'abc(d'"),
    ("regex", "  12[a-", "unclosed character class at character 5 of"),
    ("regex", "a\nb{3,1}", "invalid repetition count range"),
    ("grammar", "start: x\nx: y\n", 'line 2, column 4: unknown name: "y"'),
    ("grammar", 'root ::= "a" b\n', "Rule 'b' not found"),
    ("grammar", "root ::= (", "line 1"),
]


def reason(backend: GrammarBackend, kind: str, source: str) -> str:
    with pytest.raises(GrammarError) as found:
        backend.compile(Constraint(kind, source))
    text = str(found.value)
    assert "\n" not in text and len(text) <= 500
    return text


@pytest.mark.parametrize(("kind", "source", "words"), TEXTS, ids=[source for _, source, _ in TEXTS])
def test_places_in_texts(backend: GrammarBackend, kind: str, source: str, words: str) -> None:
    assert words in reason(backend, kind, source)


WRONG: list[Any] = [{"not": {}}, {"type": "text"}, {"type": "string", "pattern": "ab(c"}, {"uniqueItems": True}]


def test_places_in_schemas(backend: GrammarBackend) -> None:
    """An invalid part inside random properties, lists and definitions."""
    for _ in range(20):
        part: Any = random.choice(WRONG)
        pointer = ""
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
