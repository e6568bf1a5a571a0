"""A slice of `benchmarks.structured_output`: random texts that the masks of generated schemas allow are valid. Also
tests the parts that llguidance alone does not enforce."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from moe_engine.structured_output.backend import GrammarBackend, GrammarError
from moe_engine.tokenizer.tokenizer import Tokenizer
from moe_engine.types.constraint import Constraint
from tests.structured_output.test_llguidance_backend import backend, tokenizer
from tests.structured_output.test_tool_calls import spells

__all__ = ["backend", "tokenizer"]  # fixtures


def test_texts_of_drawn_schemas_are_valid() -> None:
    pytest.importorskip("jsonschema", exc_type=ImportError)
    from benchmarks.structured_output.schemas import draw_schemas
    from benchmarks.structured_output.walks import run_walks

    seed = random.randrange(1 << 30)
    schemas = draw_schemas(seed, 64)
    found = run_walks("llguidance", schemas, seed, 3)
    assert not found.faults, found.faults[0]
    assert found.finished > 100
    usual = [reason for reason in found.reasons if not reason.startswith(("seldom enforced", "impossible"))]
    assert len(usual) < 16, usual


def compiled(backend: GrammarBackend, schema: Any) -> Any:
    return backend.compile(Constraint("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ('^[^"]{2}$', ["ab", "é\\\\"], ['a\\"', "\\u0001b"]),
        (r"^[^\\]{2}$", ['a\\"'], ["a\\\\"]),
        (r"^[^\"\n]$", ["\\\\", "a"], ['\\"', "\\n"]),
        (r"^[\[^a\]]$", ["^", "["], ["b"]),
    ],
)
def test_classes_without_quote_or_backslash(
    backend: GrammarBackend, tokenizer: Tokenizer, pattern: str, good: list[str], bad: list[str]
) -> None:
    key = {"type": "object", "patternProperties": {pattern: {"type": "null"}}, "additionalProperties": False}
    for schema, around in (({"type": "string", "pattern": pattern}, '"%s"'), (key, '{"%s":null}')):
        grammar = compiled(backend, schema)
        for text in good:
            assert spells(tokenizer, grammar.matcher(), around % text), text
        for text in bad:
            assert not spells(tokenizer, grammar.matcher(), around % text), text


REFUSED: list[tuple[Any, str]] = [
    ({"exclusiveMinimum": 0, "maximum": 0.25}, "exclusiveMinimum 0 is not enforced with the other bound 0.25"),
    ({"minimum": -0.5, "allOf": [{"exclusiveMaximum": 0}]}, "exclusiveMaximum 0 is not enforced"),
    ({"$defs": {"p": {"exclusiveMinimum": 10}}, "$ref": "#/$defs/p", "maximum": 10.5}, "exclusiveMinimum 10"),
    ({"properties": {"enum": {"exclusiveMinimum": 0, "maximum": 0.25}}}, "exclusiveMinimum 0"),
    ({"pattern": r"^[\x00-!#-~]$"}, "has control characters"),
    (False, "the schema false allows no value"),
]


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_only_seems_enforced_is_refused(backend: GrammarBackend, schema: Any, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        compiled(backend, schema)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (True, "[1]", "["),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "0.5", "0"),
        ({"type": "number", "minimum": 0, "maximum": 0.25}, "0", "0.3"),
        ({"type": "integer", "exclusiveMinimum": 0}, "3", "0"),
        ({"const": {"pattern": '[^"]'}}, '{"pattern":"[^\\"]"}', "{}"),
    ],
)
def test_neighbors_of_what_is_refused(
    backend: GrammarBackend, tokenizer: Tokenizer, schema: Any, good: str, bad: str
) -> None:
    grammar = compiled(backend, schema)
    assert spells(tokenizer, grammar.matcher(), good) and not spells(tokenizer, grammar.matcher(), bad)
