"""Enforced calls in formats that write arguments one by one: random outputs of random tools are calls with matching
arguments; texts that must pass and texts that must not; constraints that such a format cannot enforce are refused by
name."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest

from moe_engine.errors import InputError
from moe_engine.structured_output.backend import GrammarBackend, GrammarError
from moe_engine.structured_output.tool_call_grammar import lark_of_calls
from moe_engine.structured_output.tool_choice import tool_constraint
from moe_engine.tokenizer.tokenizer import Tokenizer
from moe_engine.tokenizer.tool_calls import TOOL_FORMATS, ToolCallParser
from moe_engine.types.constraint import Constraint
from tests.structured_output.schemas import draw_schemas
from tests.structured_output.test_llguidance_backend import EOS, allowed, backend, tokenizer
from tests.structured_output.test_tool_calls import spells, tool
from tests.tokenizer.read_calls import read_calls

__all__ = ["backend", "tokenizer"]  # fixtures

FORMS = (
    "qwen3_coder",
    "mimo",
    "seed_oss",
    "glm45",
    "deepseekv32",
    "deepseekv4",
    "deepseekv41",
    "minimax-m2",
    "minimax-m3",
    "pythonic",
    "hunyuan",
    "hy_v3",
    "dots",
    "gemma4",
    "olmo3",
    "lfm2",
)
LEAVES: list[Any] = [
    {"type": "string"},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "enum": ["a b", 'c"d', "<x>", ""]},
    {"const": "one"},
    {"type": "string", "pattern": "^[a-c]{1,3}$"},
    {"type": "string", "format": "date"},
    {"type": "boolean"},
    {"type": ["string", "null"], "maxLength": 3},
    {"type": "integer", "minimum": -3, "maximum": 99},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
    {"enum": ["x", 1, None, True]},
    {"$ref": "#/$defs/unit"},
    {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    {"type": "object", "properties": {"z": {"enum": ["</parameter>", "]"]}}, "additionalProperties": False},
]


def parameters(rng: random.Random) -> dict[str, Any]:
    names = rng.sample(["city", "a_1", "unit", "é", "x"], rng.randint(0, 4))
    leaf = lambda: rng.choice([*LEAVES, draw_schemas(rng.randrange(1 << 30), 1)[0]])  # noqa: E731
    return {
        "$defs": {"unit": {"enum": ["C", "F"]}},
        "type": "object",
        "properties": {name: leaf() for name in names},
        "required": [name for name in names if rng.random() < 0.5],
        "additionalProperties": rng.choice([True, False]),
    }


def parse(text: str, form: str, functions: Mapping[str, Any], size: int) -> tuple[str, list[tuple[str, Any]]]:
    """Plain text and calls, from pieces of `size` characters."""
    parser = ToolCallParser(form, functions, is_json=True)
    shown, calls, _ = read_calls(parser, text, size)
    assert not parser.cut
    return shown, [(name, json.loads(arguments)) for name, arguments in calls]


def walk(grammar: Any, rng: random.Random, tokenizer: Tokenizer, limit: int = 3000) -> str | None:
    """A random text that the masks allow; closing characters are preferred near the end. None: the text did not end."""
    state, ids = grammar.matcher(), list[int]()
    while len(ids) < limit:
        some = allowed(state)
        if EOS in some and rng.random() < 0.5:
            break
        ids.append(rng.choice(sorted(some - {EOS})) if some != {EOS} else EOS)
        if ids[-1] == EOS:
            ids.pop()
            break
        state.accept(ids[-1])
    else:
        return None
    return b"".join(
        tokenizer.token_text(i).encode() if i in tokenizer.special_ids else tokenizer.exact_bytes(i) for i in ids
    ).decode()


@pytest.mark.drawn(8)
@pytest.mark.parametrize("form", FORMS)
def test_random_outputs_are_calls_that_match(backend: GrammarBackend, tokenizer: Tokenizer, form: str) -> None:
    rng, found, refused = random.Random(random.randrange(1 << 30)), 0, 0
    for _ in range(12):
        schemas = {name: parameters(rng) for name in ("weather", "get.time")}
        tools = [tool(name, schema) for name, schema in schemas.items()]
        several = rng.random() < 0.5
        constraint = tool_constraint(tools, form, "tool_choice", required=True, several=several)
        try:
            grammars = [backend.compile(constraint)]
        except GrammarError:
            refused += 1  # a generated leaf that the library refuses by name
            continue
        # markers that this vocabulary has as special tokens may be texts of others, and the reverse
        special = {"\uff5cDSML\uff5c": 2, "<tool_call>": 3, "</tool_call>": 4, "</arg_value>": 5}
        lark_of_calls(json.loads(constraint.source), {"whitespace_pattern": " "}, special)
        for grammar in grammars * 2:
            text = walk(grammar, rng, tokenizer)
            if text is None:
                continue
            shown, calls = parse(text, form, schemas, rng.choice((1, 3, len(text))))
            assert not shown and calls and (several or len(calls) == 1), text
            for name, arguments in calls:
                jsonschema.validate(arguments, schemas[name])
                found += 1
    assert found >= 6 and refused < 6, (found, refused)


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
CALLS = {
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\n%s\n</parameter>\n</function>\n</tool_call>",
    "mimo": "<tool_call>\n<function=weather>\n<parameter=city>%s</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">%s</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "minimax-m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="weather">]<]minimax[>[<city>%s'
    "]<]minimax[>[</city>"
    "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "deepseekv32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">%s'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "pythonic": '[weather(city="%s")]',
    "olmo3": '<function_calls>\nweather(city="%s")\n</function_calls>',
    "lfm2": '<|tool_call_start|>[weather(city="%s")]<|tool_call_end|>',
    "gemma4": '<|tool_call>call:weather{city:<|"|>%s<|"|>}<tool_call|>',
    "hunyuan": "<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>%s</arg_value>\n"
    "</tool_call>\n</tool_calls>",
}


@pytest.mark.drawn(8)
@pytest.mark.parametrize("form", CALLS)
def test_text_or_calls_of_strict_functions(backend: GrammarBackend, tokenizer: Tokenizer, form: str) -> None:
    tools = [tool("weather", CITY, strict=True), tool("free", {"properties": {"x": {"not": {}}}})]
    grammar = backend.compile(tool_constraint(tools, form, "tools", required=False, several=True))
    right, wrong = CALLS[form] % "Rome", CALLS[form] % "ten letters"
    unopened = right.removeprefix(TOOL_FORMATS[form].syntax.begin).strip()
    good = ["", "any [1] <text> f(x)", right, "I look.\n" + right]
    bad = [wrong, "x" + wrong, right + "x", "[1] " + wrong]
    if TOOL_FORMATS[form].syntax.also_begins:
        bad.append(unopened)
    for texts, wanted in ((good, True), (bad, False)):
        for text in texts:
            assert spells(tokenizer, grammar.matcher(), text) == wanted, text
    shown, calls = parse("I look.\n" + right, form, {"weather": CITY, "free": None}, 2)
    assert (shown.strip(), calls) == ("I look.", [("weather", {"city": "Rome"})])


def test_markers_in_strings_are_text() -> None:
    value = ["</parameter>", ")]", "<tool_call>", "</arg_value>", 'a"b']
    schema = {"properties": {"list": {"type": "array"}, "n": {"type": "number"}}}
    for form in FORMS:
        syntax = TOOL_FORMATS[form].syntax
        assert syntax.parameters is not None
        one, text = syntax.parameters, json.dumps(value)
        call = (
            syntax.before_arguments("f")
            + one.before
            + "list"
            + one.after_name
            + text
            + one.end_of("list")
            + one.between
        )
        call += one.before + "n" + one.after_name + "-1.5e3" + one.end_of("n") + syntax.after_arguments
        whole = syntax.begin + syntax.after_begin + call + syntax.end
        for size in (1, 5, len(whole)):
            assert parse(whole, form, {"f": schema}, size) == ("", [("f", {"list": value, "n": -1500.0})]), form


REFUSED: list[tuple[Any, str]] = [
    ({"properties": {"a": {}}, "minProperties": 1}, r"parameters.minProperties: is not enforced"),
    ({"anyOf": [{"required": ["a"]}]}, r"parameters.anyOf: is not enforced"),
    ({"properties": {'a"b': {}}, "required": ['a"b']}, r"parameters.properties: .* cannot be written"),
    ({"required": ["a"], "additionalProperties": False}, r"parameters.required: 'a' cannot be written"),
]


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=[words for _, words in REFUSED])
@pytest.mark.parametrize("form", ("glm45", "pythonic"))
def test_what_is_not_enforced_is_refused(schema: Any, words: str, form: str) -> None:
    with pytest.raises(InputError, match=words):
        tool_constraint([tool("f", schema)], form, "tool_choice", required=True, several=True)
    tool_constraint([tool("f", schema)], form, "tools", required=False, several=True)
    optional = {"properties": {'a b"': {"type": "integer"}, "c": {"type": "integer"}}}
    source = tool_constraint([tool("f", optional)], form, "tool_choice", required=True, several=True).source
    assert len(json.loads(source)["calls"][0]["parameters"]) == 1


def test_constraint_kind() -> None:
    found = tool_constraint([tool("f", CITY)], "pythonic", "tool_choice", required=True, several=False)
    assert isinstance(found, Constraint) and json.loads(found.source)["form"] == "pythonic"
