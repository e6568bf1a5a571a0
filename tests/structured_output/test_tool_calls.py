"""Tool calls as a constraint: random outputs are calls with matching arguments; texts that must pass and texts that
must not."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from moe_engine.errors import InputError
from moe_engine.structured_output.backend import CompiledGrammar, GrammarBackend, GrammarError, Matcher
from moe_engine.structured_output.tool_call_grammar import lark_of_calls
from moe_engine.structured_output.tool_choice import tool_constraint
from moe_engine.tokenizer.tokenizer import Tokenizer
from moe_engine.tokenizer.tool_calls import TOOL_FORMATS, CallSyntax, ToolCallParser
from moe_engine.tokenizer.tool_calls.named import CALL_END, CALLS_BEGIN, CALLS_END
from moe_engine.types.constraint import Constraint, FreeReasoning
from tests.structured_output.test_llguidance_backend import EOS, accepts, allowed, backend, tokenizer
from tests.tokenizer.read_calls import read_calls

__all__ = ["backend", "tokenizer"]  # fixtures


SYNTAX: dict[str, CallSyntax] = {
    name: TOOL_FORMATS[name].syntax
    for name in (
        "deepseekv3",
        "deepseekv31",
        "qwen25",
        "llama3",
        "mistral",
        "kimi_k2",
        "hunyuan_a13b",
        "minimax_m1",
        "solar_open",
        "granite",
        "cohere_command4",
        "phi4_mini_json",
        "nemotron_json",
    )
}  # type: ignore[misc]


def tool(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


WEATHER = {
    "$defs": {"unit": {"enum": ["C", "F"]}},
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"$ref": "#/$defs/unit"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [tool("weather", WEATHER), tool("now")]
SCHEMAS = {"weather": WEATHER, "now": NOTHING}
INTEGER = Constraint("json_schema", '{"type":"integer"}', "response_format")


def draw(grammar: CompiledGrammar, rng: random.Random, first: Sequence[int] = (), limit: int = 4000) -> list[int]:
    """Tokens that the masks allow, random after the first ones, up to the end of the grammar."""
    state, ids = grammar.matcher(), list(first)
    for token in first:
        assert token in allowed(state)
        state.accept(token)
    while len(ids) < limit:
        token = EOS if EOS in (some := allowed(state)) and rng.random() < 0.5 else rng.choice(sorted(some))
        if token == EOS:
            return ids
        state.accept(token)
        ids.append(token)
    raise AssertionError("no end")


def parse(tokenizer: Tokenizer, ids: list[int], form: str, content: bool = False) -> tuple[str, list[tuple[str, Any]]]:
    parser = ToolCallParser(form, is_json=True, content_is_json=content)
    shown, calls, _ = read_calls(parser, tokenizer.decode(ids, keep=tokenizer.special_ids), 1)
    return shown, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("form", [*SYNTAX, "glm4"])
@pytest.mark.parametrize("several", [True, False])
def test_random_outputs_are_calls(backend: GrammarBackend, tokenizer: Tokenizer, form: str, several: bool) -> None:
    rng = random.Random(random.randrange(1 << 30))
    grammar = backend.compile(tool_constraint(TOOLS, form, "tool_choice", required=True, several=several))
    counts = set()
    for _ in range(20):
        shown, calls = parse(tokenizer, draw(grammar, rng), form)
        assert not shown and calls
        for name, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[name])
        counts.add(len(calls))
    assert counts == {1} if not several else len(counts) > 1


@pytest.mark.parametrize("form", SYNTAX)
def test_text_or_calls_of_strict_functions(backend: GrammarBackend, tokenizer: Tokenizer, form: str) -> None:
    tools = [tool("weather", WEATHER, strict=True), tool("free", {"type": "object", "required": ["x"]})]
    constraint = tool_constraint(tools, form, "tools", required=False, several=True)
    wire = SYNTAX[form]

    def calls(*named: tuple[str, str]) -> str:
        each = [wire.before_arguments(name) + text + wire.after_arguments for name, text in named]
        return wire.begin + wire.after_begin + wire.between.join(each) + wire.end

    right, wrong = ("weather", '{"city":"Rome","unit":"C"}'), ("weather", '{"city":"Rome"}')
    good = ["", "any <text>", calls(right), "I look.\n" + calls(right, ("free", '{"y": [1]}'), right)]
    bad = [calls(wrong), "x" + calls(right, wrong), calls(("other", "{}")), calls(("free", "5")), calls(right) + "x"]
    grammar = backend.compile(constraint)
    for texts, wanted in ((good, True), (bad, False)):
        for text in texts:
            assert spells(tokenizer, grammar.matcher(), text) == wanted, text
    if wire.begin != CALLS_BEGIN:
        return
    spelled = [part for char in CALLS_BEGIN for part in tokenizer.encode(char, False)]
    assert len(spelled) > 1 and not accepts(grammar.matcher(), spelled)


def spells(tokenizer: Tokenizer, state: Matcher, text: str) -> bool:
    """True if the masks allow a text, in any tokenization, and its end."""
    rest = text.encode()
    while rest:
        spelled = {i: tokenizer.token_bytes(i) for i in allowed(state)}
        fitting = [i for i, part in spelled.items() if part and rest.startswith(part)]
        if not fitting:
            return False
        token = max(fitting, key=lambda i: len(spelled[i]))
        state.accept(token)
        rest = rest.removeprefix(spelled[token])
    return EOS in allowed(state)


@pytest.mark.parametrize("form", SYNTAX)
def test_markers_that_are_no_tokens(backend: GrammarBackend, tokenizer: Tokenizer, form: str) -> None:
    rng, found = random.Random(random.randrange(1 << 30)), []
    for required in (True, False):
        source = json.loads(tool_constraint(TOOLS, form, "tools", required=required, several=False).source)
        grammar = backend.compile(Constraint("grammar", lark_of_calls(source, {"whitespace_pattern": " "}, {})))
        for _ in range(10):
            ids = draw(grammar, rng)
            assert not tokenizer.special_ids & set(ids)
            found.append(parse(tokenizer, ids, form)[1])
    assert all(len(calls) == 1 for calls in found[:10])
    for name, arguments in [call for calls in found[:10] for call in calls]:
        jsonschema.validate(arguments, {**SCHEMAS, "now": True}[name])
    for name, arguments in [call for calls in found[10:] for call in calls]:  # by chance, without strict
        assert name in {*SCHEMAS, "now"} and isinstance(arguments, dict)


def test_content_of_a_schema_or_calls(backend: GrammarBackend, tokenizer: Tokenizer) -> None:
    tools = [tool("weather", WEATHER, strict=True), tool("now", strict=True)]  # random free arguments seldom end
    constraint = tool_constraint(tools, "deepseekv31", "tools", required=False, several=True, content=INTEGER)
    grammar, rng = backend.compile(constraint), random.Random(random.randrange(1 << 30))
    begin = tokenizer.token_id(CALLS_BEGIN)
    assert begin is not None
    for first in [(), (begin,)] * 5:
        shown, calls = parse(tokenizer, draw(grammar, rng, first), "deepseekv31", content=True)
        assert bool(calls) != bool(shown) and (not shown or isinstance(json.loads(shown), int))
        assert calls or not first


def test_calls_behind_the_reasoning(backend: GrammarBackend, tokenizer: Tokenizer) -> None:
    grammar = backend.compile(tool_constraint(TOOLS, "deepseekv31", "tool_choice", required=True, several=False))
    state = grammar.matcher(FreeReasoning("<think>", "</think>", True))
    for token in tokenizer.encode("free text</think>", False):
        assert token in allowed(state)
        state.accept(token)
    assert allowed(state) == {tokenizer.token_id(CALLS_BEGIN)}


def test_markers_in_strings_are_text() -> None:
    arguments = json.dumps({"a": f'\\"{CALL_END}"\\', "b": [CALLS_END]}, ensure_ascii=False)
    wire = SYNTAX["deepseekv31"]
    text = CALLS_BEGIN + wire.before_arguments("f") + arguments + wire.after_arguments + CALLS_END
    for size in (1, 2, 7, len(text)):
        parser, found = ToolCallParser("deepseekv31", is_json=True), ""
        for at in range(0, len(text), size):
            found += "".join(delta.arguments for delta in parser.push(text[at : at + size])[1])
        assert found == arguments and not parser.cut
    content = json.dumps([CALLS_BEGIN, '"'], ensure_ascii=False)
    assert ToolCallParser("deepseekv31", content_is_json=True).push(content)[0] == content


WRONG: list[tuple[list[Any], str]] = [
    ([tool("a"), tool("a")], r"tools\[1\].function.name: 'a' is defined twice"),
    ([tool("a"), tool(f"b{SYNTAX['deepseekv31'].after_name}")], r"tools\[1\].function.name: "),
    ([tool(f"a{CALL_END}")], r"tools\[0\].function.name: 'a.*cannot be written in format deepseekv31"),
    ([tool(" a")], r"tools\[0\].function.name: ' a' cannot be written"),
    ([tool("a", {"type": "array"})], r"tools\[0\].function.parameters.type: expected 'object'"),
    ([tool("a", {"x": "\ud800"})], r"tools\[0\].function.parameters: contains half of a surrogate pair"),
]


@pytest.mark.parametrize(("tools", "words"), WRONG, ids=[words for _, words in WRONG])
def test_wrong_tools(tools: list[Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        tool_constraint(tools, "deepseekv31", "tool_choice", required=True, several=True)


def test_the_function_of_a_schema_that_is_not_enforced(backend: GrammarBackend) -> None:
    tools = [tool("good", WEATHER), tool("bad", {"not": {}})]
    with pytest.raises(GrammarError, match=r"parameters of function 'bad': .*not"):
        backend.compile(tool_constraint(tools, "deepseekv3", "tool_choice", required=True, several=True))
    backend.compile(tool_constraint(tools, "deepseekv3", "tools", required=False, several=True))
