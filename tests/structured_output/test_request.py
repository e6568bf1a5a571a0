"""Fields of constraints: spellings, one constraint at most, wrong values; prefixes of structural tags."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moe_engine.errors import InputError
from moe_engine.sampling_checks import build_sampling, parse_sampling
from moe_engine.server.openai.types import ChatRequest
from moe_engine.types.constraint import Constraint
from moe_engine.validation import checked

SCHEMA = {"type": "object"}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
TAG = {"type": "structural_tag", "structures": [], "triggers": []}
SPELLINGS: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"json_schema": TEXT}, ("json_schema", TEXT)),
    ({"regex": "a+"}, ("regex", "a+")),
    ({"ebnf": "root ::= x"}, ("grammar", "root ::= x")),
    ({"guided_json": SCHEMA}, ("json_schema", TEXT)),
    ({"guided_regex": "a"}, ("regex", "a")),
    ({"guided_choice": ["a", "b"]}, ("choice", '["a", "b"]')),
    ({"guided_grammar": "start: x"}, ("grammar", "start: x")),
    ({"structured_outputs": {"json": TEXT, "regex": None}}, ("json_schema", TEXT)),
    ({"structured_outputs": {"choice": ["a"]}}, ("choice", '["a"]')),
    ({"structured_outputs": {"grammar": "a: x"}, "guided_grammar": "a: x"}, ("grammar", "a: x")),  # as guidance sends
    ({"guided_json": SCHEMA, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
     ("json_schema", TEXT)),
    ({"response_format": {"type": "json_object"}}, ("json_schema", TEXT)),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
     ("json_schema", TEXT)),
    ({"response_format": TAG}, ("structural_tag", json.dumps(TAG, separators=(",", ":")))),
]  # fmt: skip
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"regex": "a", "guided_json": SCHEMA}, "regex and guided_json"),
    ({"regex": "a", "guided_regex": "b"}, "regex and guided_regex"),
    ({"regex": "a", "guided_regex": "a", "structured_outputs": {"regex": "b"}}, "regex and structured_outputs.regex"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "regex and response_format"),
    ({"json_schema": "{"}, "json_schema: is not valid JSON"),
    ({"json_schema": "[1]"}, "json_schema: expected a JSON object"),
    ({"response_format": {"type": "yaml"}}, "response_format.type: 'yaml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: expected an object"),
    ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern: not available"),
    ({"guided_choice": ["a", "\ud800"]}, "guided_choice[1]"),
    ({"regex": "a", "min_tokens": 3}, "min_tokens: cannot be combined with regex"),
    ({"regex": "a", "allowed_token_ids": [1]}, "allowed_token_ids: cannot be combined with regex"),
    ({"json_schema": "[" * 8000}, "json_schema: nested too deep"),
    ({"json_schema": {"minimum": float("nan")}}, "json_schema: a number is not finite"),
    ({"json_schema": '{"minimum": -1e400}'}, "json_schema: a number is not finite"),
]


def constraint_of(fields: dict[str, Any]) -> Constraint | None:
    request = checked({"messages": [{"role": "user", "content": "x"}], **fields}, ChatRequest)
    return build_sampling(request, {}, names={"min_new_tokens": "min_tokens"}).constraint


@pytest.mark.parametrize(("fields", "key"), SPELLINGS)
def test_spellings(fields: dict[str, Any], key: tuple[str, str]) -> None:
    found = constraint_of(fields)
    assert found is not None and found.key == key


@pytest.mark.parametrize(("fields", "words"), WRONG, ids=[words for _, words in WRONG])
def test_wrong_constraints(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        constraint_of(fields)
    assert words in error.value.message


def test_native_fields_and_defaults() -> None:
    assert parse_sampling({"choice": ["a"]}).constraint == Constraint("choice", '["a"]')
    assert parse_sampling({"json_object": False}).constraint is None
    default = parse_sampling({}, defaults={"regex": "a"})
    assert default.constraint is not None and default.constraint.source == "a"
    deep: Any = {}
    for _ in range(300):
        deep = {"properties": {"a": deep}}
    with pytest.raises(InputError, match=r"sampling_params\.json_schema: nested too deep"):
        parse_sampling({"json_schema": deep})


@pytest.mark.parametrize(
    "text",
    [
        '{"enum": ["a", "\\u00e9\\n", 1, 2.5, -0.0, 1e22, true, null]}',
        ' {"b": 1, "a": {"é": [1, {"x": []}]}} ',
        '{"const": 123456789012345678901234567890}',
        '{"const": "\\ud83d\\ude42", "minimum": 1E40}',
        '{"a": 1, "a": 2}',
        "true",
    ],
)
def test_a_schema_of_text_has_the_same_meaning_as_its_object(text: str) -> None:
    """Schemas given as text use a faster path than objects."""
    of_text, of_object = (parse_sampling({"json_schema": value}).constraint for value in (text, json.loads(text)))
    assert of_text is not None and of_object is not None
    assert json.loads(of_text.source) == json.loads(of_object.source)
    assert of_text.source == of_object.source or "e" in text.lower()  # numbers may be written differently
