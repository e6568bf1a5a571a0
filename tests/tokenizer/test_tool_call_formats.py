"""Tool calls of every format: whole outputs, the same in pieces of any size, truncated outputs, and arbitrary text."""

from __future__ import annotations

import json
import random
import re
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.tokenizer.tool_calls import TOOL_FORMATS, ToolCallParser
from moe_engine.tokenizer.tool_calls.counted_ids import num_calls, with_counted_ids
from moe_engine.tokenizer.tool_calls.named import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from tests.examples import examples
from tests.tokenizer.read_calls import read_calls
from tests.tokenizer.tiny_tokenizer import make_tokenizer

FUNCTIONS = {
    "f": {"type": "object", "properties": {
        "s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}, "b": {"type": ["boolean", "null"]},
        "e": {"enum": ["1", "x"]}, "a": {"anyOf": [{"type": "string"}, {"type": "number"}]},
    }},
    "g": None,
}  # fmt: skip
FUNCTION_CALL = '{"name": "f", "arguments": {"s": "a</tool_call>[]", "n": [1, {"x": "}"}]}}'
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"


def kimi(name: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def dsml(text: str, block: str = "function_calls") -> str:
    return text.replace("calls>", f"{block}>").replace("<", "<｜DSML｜").replace("<｜DSML｜/", "</｜DSML｜")


def hunyuan(text: str, suffix: str = "") -> str:
    return text.replace(">", f"{suffix}>")


def cohere(name: str, arguments: str) -> str:
    return f'{{"tool_call_id": "0", "tool_name": "{name}", "parameters": {arguments}}}'


def gemma(call: str) -> str:
    return f"<|tool_call>{call}<tool_call|>"


def solar(call_id: str, name: str, arguments: str) -> str:
    return f"<|tool_call:begin|>{call_id}<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>"


def minimax_m3(text: str) -> str:
    """Every tag after its mark; other brackets have a space after them."""
    return re.sub(r"<(?=[a-z/])", "]<]minimax[>[<", text)


HUNYUAN = (
    "a\n<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>s</arg_key>\n<arg_value> </tool_call,\n</arg_value>\n"
    "<arg_key>n</arg_key>\n<arg_value>-5</arg_value>\n</tool_call>\n<tool_call>g<tool_sep>\n</tool_call>\n</tool_calls>"
)
HUNYUAN_CALLS = [("f", {"s": " </tool_call,\n", "n": -5}), ("g", {})]
DOTS = "<dots_function_call>{}</dots_function_call>"
DSML = (
    '<calls>\n<invoke name="f">\n<parameter name="s" string="true">5 "q"\n</parameter>\n'
    '<parameter name="n" string="false">5</parameter>\n</invoke>\n<invoke name="g">{"n": [1]}</invoke>\n</calls>'
)
DSML_CALLS = [("f", {"s": '5 "q"\n', "n": 5}), ("g", {"n": [1]})]


def kimi_k3(arguments: str, name: str) -> str:
    """A call with these arguments, and one of g without any."""
    return (
        f'<|open|>tools<|sep|><|open|>call tool="{name}" index="1"<|sep|>{arguments}<|close|>call<|sep|>'
        '<|open|>call tool="g" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    )


GOOD: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("deepseekv3", f"a {CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}f\n"
     f"```json\n{{\"s\": \"x\"}}\n```{CALL_END}{CALLS_END}",
     "a ", [("f", {"s": "x"})]),
    ("deepseekv31", f"{CALLS_BEGIN}{CALL_BEGIN}f{SEPARATOR}{{}}{CALL_END}\n"
     f"{CALL_BEGIN}g{SEPARATOR}{{}}{CALL_END}{CALLS_END} b",
     "b", [("f", {}), ("g", {})]),
    ("deepseekv32", "a\n\n" + dsml(DSML), "a\n\n", DSML_CALLS),
    ("deepseekv4", dsml(DSML, "tool_calls"), "", DSML_CALLS),
    ("deepseekv41", dsml(DSML, "calls").replace("DSML｜", "DSML｜ "), "", DSML_CALLS),
    ("qwen25", f"Hi\n<tool_call>\n{FUNCTION_CALL}\n</tool_call>\n"
     f"<tool_call>\n{{\"arguments\": {{}}, \"name\": \"g\"}}\n</tool_call>",
     "Hi\n", [("f", {"s": "a</tool_call>[]", "n": [1, {"x": "}"}]}), ("g", {})]),
    ("hermes", '<tool_call>{"name": "g"}</tool_call>\n\nb', "\n\nb", [("g", {})]),
    ("longcat", "a <longcat_tool_call>f\n<longcat_arg_key>s</longcat_arg_key>\n<longcat_arg_value>12"
     "</longcat_arg_value>\n"
     "<longcat_arg_key>n</longcat_arg_key>\n<longcat_arg_value>5</longcat_arg_value>\n</longcat_tool_call>\n"
     "<longcat_tool_call>g</longcat_tool_call>", "a ", [("f", {"s": "12", "n": 5}), ("g", {})]),
    ("longcat", f"a\n<longcat_tool_call>\n{FUNCTION_CALL}\n</longcat_tool_call>\n"
     '<longcat_tool_call>{"name": "g", "arguments": {}}</longcat_tool_call>b', "a\nb",
     [("f", {"s": "a</tool_call>[]", "n": [1, {"x": "}"}]}), ("g", {})]),
    ("qwen", '<tool_call>{"id": 1, "name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>', "", [("f", {"n": 1})]),
    ("llama3", f"{FUNCTION_CALL}; {{\"name\": \"g\", \"parameters\": {{\"a\": 1.5}}}}", "",
     [("f", {"s": "a</tool_call>[]", "n": [1, {"x": "}"}]}), ("g", {"a": 1.5})]),
    ("llama3", 'a <|python_tag|>{"name": "f", "parameters": {"s": ";"}}', "a ", [("f", {"s": ";"})]),
    ("llama3", '{"answer": 5}', '{"answer": 5}', []),
    ("mistral", f'[TOOL_CALLS] [{FUNCTION_CALL}, {{"name": "g", "arguments": {{}}}}]', "",
     [("f", {"s": "a</tool_call>[]", "n": [1, {"x": "}"}]}), ("g", {})]),
    ("mistral", 'a[TOOL_CALLS]f[ARGS]{"s": "[TOOL_CALLS]"}[TOOL_CALLS]g[CALL_ID]xyz[ARGS]{}', "a",
     [("f", {"s": "[TOOL_CALLS]"}), ("g", {})]),
    ("gpt-oss", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"s": "<|x|>"}<|call|>', "",
     [("f", {"s": "<|x|>"})]),
    ("gpt-oss", ' to=functions.g<|channel|>commentary json<|message|>{}', "", [("g", {})]),
    ("gpt-oss", "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary to=functions.g"
     "<|message|>{}<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>",
     "<|channel|>analysis<|message|>why<|end|>", [("g", {}), ("f", {})]),
    ("kimi_k2", KIMI.format(kimi("functions.f:0", '{"s": "ü"}') + kimi("functions.g:1", "{}")), "",
     [("f", {"s": "ü"}), ("g", {})]),
    ("kimi_k3", "a" + kimi_k3('<|open|>argument key="s" type="string"<|sep|>5 <b>\n<|close|>argument<|sep|>'
     '<|open|>argument key="n" type="number"<|sep|>5<|close|>argument<|sep|>', "f") + "b", "ab",
     [("f", {"s": "5 <b>\n", "n": 5}), ("g", {})]),
    ("qwen3_coder", "a <tool_call>\n<function=f>\n<parameter=s>\nif x < 1:\n\n    pass\n\n</parameter>\n"
     "<parameter=b>\nTrue\n"
     "</parameter>\n<parameter=o>\n{'k': [1]}\n</parameter>\n</function>\n</tool_call>\n"
     "<tool_call>\n<function=g>\n</function>\n"
     "</tool_call>", "a ", [("f", {"s": "if x < 1:\n\n    pass\n", "b": True, "o": {"k": [1]}}), ("g", {})]),
    ("qwen3_coder", "<function=f><parameter=n>5</parameter></function>", "", [("f", {"n": 5})]),
    ("step3p5", "a <tool_call>\n<function=f>\n<parameter=s>\nls\n</parameter>\n<parameter=n>\n5\n</parameter>\n"
     "</function>\n</tool_call>", "a ", [("f", {"s": "ls", "n": 5})]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nParis <parameter=x>\n\n<parameter=n>5\n<parameter=o>{}\n"
     "</function>\n</tool_call>\n<function=g>\n<parameter=a>b\n</function>", "",
     [("f", {"s": "Paris <parameter=x>\n", "n": 5, "o": {}}), ("g", {"a": "b"})]),
    ("mimo", "a <tool_call>\n<function=f>\n<parameter=s>\nls && pwd\n</parameter>\n<parameter=n>5</parameter>\n"
     "<parameter=o>{\"k\": [1]}</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n"
     "</tool_call>", "a ", [("f", {"s": "\nls && pwd\n", "n": 5, "o": {"k": [1]}}), ("g", {})]),
    ("glm45", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>12</arg_value>\n"
     "<arg_key>e</arg_key>\n<arg_value>1</arg_value>\n"
     "<arg_key>a</arg_key>\n<arg_value>2.5</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>", "",
     [("f", {"s": "12", "e": "1", "a": 2.5}), ("g", {})]),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>\"5\"</arg_value>\n</tool_call><tool_call>f\n"
     "<arg_key>a</arg_key>\n<arg_value>'x'</arg_value>\n</tool_call>", "", [("f", {"a": '"5"'}), ("f", {"a": "'x'"})]),
    ("glm47", "<tool_call>g<arg_key>x</arg_key><arg_value>word</arg_value></tool_call>b", "b", [("g", {"x": "word"})]),
    ("poolside_v1", "a<tool_call>f<arg_key>n</arg_key><arg_value>5</arg_value></tool_call>\n<tool_call>g</tool_call>",
     "a", [("f", {"n": 5}), ("g", {})]),
    ("ling3", "a<tool_call>f\n<arg_key>n</arg_key><arg_value>5</arg_value></tool_call><tool_call>g</tool_call>", "a",
     [("f", {"n": 5}), ("g", {})]),
    ("seed_oss", "a <seed:tool_call>\n<function=f>\n<parameter=s>\nls && pwd\n</parameter>\n"
     "<parameter=n>5</parameter>\n<parameter=o>{'k': [1]}</parameter>\n</function>\n</seed:tool_call>\n"
     "<seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>", "a ",
     [("f", {"s": "\nls && pwd\n", "n": 5, "o": {"k": [1]}}), ("g", {})]),
    ("minimax_m1", f"a\n<tool_calls>\n{FUNCTION_CALL}\n{{\"name\": \"g\", \"arguments\": {{}}}}\n</tool_calls>\nb",
     "a\n\nb", [("f", {"s": "a</tool_call>[]", "n": [1, {"x": "}"}]}), ("g", {})]),
    ("minimax_m1", '<tool_calls>{"name": "f", "arguments": {"s": "</tool_calls>"}}</tool_calls>', "",
     [("f", {"s": "</tool_calls>"})]),
    ("minimax-m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="o">{"a": null}</parameter>\n'
     '<parameter name="b">null</parameter>\n</invoke>\n</minimax:tool_call>', "",
     [("f", {"o": {"a": None}, "b": None})]),
    ("minimax-m3", "a " + minimax_m3('<tool_call>\n<invoke name="f"><s>x > 1\n</s><n>5</n><b>null</b><e>1</e>'
     "<o><k><item>1</item><item><u>v</u></item></k></o></invoke>\n<invoke name=\"g\"></invoke>\n</tool_call>"), "a ",
     [("f", {"s": "x > 1\n", "n": 5, "b": None, "e": "1", "o": {"k": [1, {"u": "v"}]}}), ("g", {})]),
    ("minimax-m3", minimax_m3('<invoke name="g"><l><item>a</item></l><m>]<]mini 2.5</m></invoke></tool_call>') + "b",
     "b", [("g", {"l": ["a"], "m": "]<]mini 2.5"})]),
    ("minimax-m3", minimax_m3('<tool_call><invoke name="f"><o></o><a>2.5</a></tool_call>'), "",
     [("f", {"o": {}, "a": 2.5})]),
    ("hunyuan", HUNYUAN, "a\n", HUNYUAN_CALLS),
    ("hunyuan", "<tool_call>g<arg_key>x</arg_key><arg_value>word</arg_value></tool_call>b", "b",
     [("g", {"x": "word"})]),
    ("hy_v3", hunyuan(HUNYUAN, ":opensource"), "a\n", HUNYUAN_CALLS),
    ("hunyuan_a13b", f'a<tool_calls>[{FUNCTION_CALL}, {{"name": "g", "arguments": {{}}}}]</tool_calls>\n', "a",
     [("f", {"s": "a</tool_call>[]", "n": [1, {"x": "}"}]}), ("g", {})]),
    ("hunyuan_a13b", '<tool_calls>{"name": "g"}</tool_calls>b', "b", [("g", {})]),
    ("solar_open", "a <|tool_calls|>" + solar("a1b2", "f", '{"s": "<|tool"}') + solar("a1b2", "g", "{}") + "<|calls|>",
     "a ", [("f", {"s": "<|tool"}), ("g", {})]),
    ("ernie45", f"<tool_call>\n{FUNCTION_CALL}\n</tool_call>\n", "",
     [("f", {"s": "a</tool_call>[]", "n": [1, {"x": "}"}]})]),
    ("dots", "a " + DOTS.format('\n<invoke name="f">\n<parameter name="s">x > y</parameter>\n<parameter name="n">\n5\n'
     '</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n'), "a ", [("f", {"s": "x > y", "n": 5}), ("g", {})]),
    ("dots", DOTS.format('\n{"name": "f", "parameters": {"s": "</invoke>"}}\n') + "\n" + DOTS.format('{"name": "g"}'),
     "", [("f", {"s": "</invoke>"}), ("g", {})]),
    ("pythonic", '[f(s="a]\'", n=-1), g(o={"k": [1, None]})] b [1, 2] [x] [f(1)]', " b [1, 2] [x] [f(1)]",
     [("f", {"s": "a]\'", "n": -1}), ("g", {"o": {"k": [1, None]}})]),
    ("pythonic", "<|python_start|>[g()]<|python_end|>", "", [("g", {})]),
    ("gemma4", gemma('call:f{a:2.5,b:null,e:<|"|>1<|"|>,n:-5,o:{k:[1,<|"|>x]}<|"|>,{l:true}],m:{}},'
     's:<|"|>a "q"\n},\\<|"|>}') + gemma("call:g{}"), "",
     [("f", {"a": 2.5, "b": None, "e": "1", "n": -5, "o": {"k": [1, "x]}", {"l": True}], "m": {}}, "s": 'a "q"\n},\\'}),
      ("g", {})]),
    ("gemma4", "a\n" + gemma(' call:g { x : word , <|"|>y<|"|>:"q", z:[] }') + " b", "a\n b",
     [("g", {"x": "word", "y": "q", "z": []})]),
    ("olmo3", "a\n<function_calls>\nf(s='a]\\'', n=-1, b=null)\n\ng(o={\"k\": [1, true]})\n</function_calls>\n", "a\n",
     [("f", {"s": "a]'", "n": -1, "b": None}), ("g", {"o": {"k": [1, True]}})]),
    ("olmo3", "<function_calls>g(), g()</function_calls> b", " b", [("g", {}), ("g", {})]),
    ("glm4", 'f\n{"s": "a\\n}", "o": {"k": [1]}}<|assistant|>g \n{}', "",
     [("f", {"s": "a\n}", "o": {"k": [1]}}), ("g", {})]),
    ("glm4", '\nfor f\n\ng\nf\n {"n": 5}\n', "\nfor f\n\ng\n", [("f", {"n": 5})]),
    ("lfm2", '<|tool_call_start|>[f(s="a]", n=-1), g(o={"k": [1, None]})]<|tool_call_end|>Done', "Done",
     [("f", {"s": "a]", "n": -1}), ("g", {"o": {"k": [1, None]}})]),
    ("lfm2", f'a<|tool_call_start|>[{FUNCTION_CALL}, {{"name": "g"}}]<|tool_call_end|>', "a",
     [("f", {"s": "a</tool_call>[]", "n": [1, {"x": "}"}]}), ("g", {})]),
    ("lfm2", "<|tool_call_start|>[g()]<|tool_call_end|>\n<|tool_call_start|>g()<|tool_call_end|>", "",
     [("g", {}), ("g", {})]),
    ("granite", f'a<|tool_call|>[{FUNCTION_CALL}, {{"arguments": {{}}, "name": "g"}}] b', "a b",
     [("f", {"s": "a</tool_call>[]", "n": [1, {"x": "}"}]}), ("g", {})]),
    ("granite", '<tool_call> [{"name": "g", "arguments": {}}]', "", [("g", {})]),
    ("cohere_command4", "a<|START_ACTION|>[\n    " + cohere("f", '{"s": "]"}') + ",\n    " + cohere("g", "{}")
     + "\n]<|END_ACTION|>", "a", [("f", {"s": "]"}), ("g", {})]),
    ("cohere_command3", '<|START_ACTION|>{"tool_name": "g", "parameters": {}}<|END_ACTION|>b', "b", [("g", {})]),
    ("phi4_mini_json", f'functools[{FUNCTION_CALL},{{"name": "g", "parameters": {{}}}}]', "",
     [("f", {"s": "a</tool_call>[]", "n": [1, {"x": "}"}]}), ("g", {})]),
    ("phi4_mini_json", '<|tool_call|>{"name": "g", "arguments": {}}<|/tool_call|>b', "b", [("g", {})]),
    ("nemotron_json", f'a\n<TOOLCALL>[{FUNCTION_CALL}, {{"name": "g", "arguments": {{}}}}]</TOOLCALL> b', "a\n b",
     [("f", {"s": "a</tool_call>[]", "n": [1, {"x": "}"}]}), ("g", {})]),
    ("nemotron_json", '<TOOLCALL>[{"name": "g", "arguments": {}}', "", [("g", {})]),
    ("phi4_mini_json", "import functools as f", "import functools as f", []),
    ("gemma4", gemma("call:f{s:12,n:5,o:{k:[1"), "", [("f", {"s": "12", "n": 5, "o": {"k": [1]}})]),
]  # fmt: skip


def parse(form: str, text: str, size: int, **options: Any) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Plain text, calls with the text of their arguments, ids."""
    beginnings = options.pop("beginnings", None)
    return read_calls(ToolCallParser(form, options.pop("functions", FUNCTIONS), **options), text, size, beginnings)


@pytest.mark.parametrize(
    ("form", "text", "shown", "calls"), GOOD, ids=[f"{case[0]} {i}" for i, case in enumerate(GOOD)]
)
def test_a_good_output(form: str, text: str, shown: str, calls: list[tuple[str, Any]]) -> None:
    for size in [*range(1, 24), len(text)]:
        found, named, ids = parse(form, text, size)
        assert (found, [(name, json.loads(arguments)) for name, arguments in named]) == (shown, calls), size
        assert len(set(ids)) == len(ids)
    if calls:
        assert [name for name, _ in parse(form, text, 5, parallel=False)[1]] == [calls[0][0]]
        only = parse(form, text, 5, functions={"g": None})[1]
        assert [name for name, _ in only] == [name for name, _ in calls if name == "g"]


@pytest.mark.parametrize(
    ("form", "text", "shown", "calls"), GOOD, ids=[f"{case[0]} {i}" for i, case in enumerate(GOOD)]
)
def test_a_cut_output(form: str, text: str, shown: str, calls: list[tuple[str, Any]]) -> None:
    """The result does not depend on the pieces, and complete calls are kept."""
    for end in range(len(text)):
        found = parse(form, text[:end], len(text))[:2]
        assert found == parse(form, text[:end], random.randint(1, 9))[:2], end
        for (name, arguments), (wanted_name, wanted) in zip(found[1][:-1], calls):
            assert (name, json.loads(arguments)) == (wanted_name, wanted)


UNDECIDED = re.compile(r't|to|\{"[^}]*|(<\|python_start\|>)?\[\w?')
"""Texts that may be the answer, or a call without a mark before it."""


@pytest.mark.parametrize(
    ("form", "text", "shown", "calls"), GOOD, ids=[f"{case[0]} {i}" for i, case in enumerate(GOOD)]
)
def test_marks_that_max_tokens_cuts(form: str, text: str, shown: str, calls: list[tuple[str, Any]]) -> None:
    """The marks are several tokens of this vocabulary: wherever the output is cut, none is text or an argument."""
    tokenizer = make_tokenizer()
    ids, whole = tokenizer.encode(text, add_special_tokens=False), parse(form, text, len(text))[1]
    for count in range(1, len(ids)):
        cut = tokenizer.decode(ids[:count], skip_special_tokens=False)
        if cut.endswith("\ufffd") or UNDECIDED.fullmatch(cut.strip()):
            continue
        found, named, _ = parse(form, cut, random.randint(1, 9), beginnings=tokenizer.beginnings)
        assert shown.startswith(found.rstrip()), cut
        for (_, arguments), (_, wanted) in zip(named, whole):
            same = (a == b for a, b in zip(arguments, wanted))
            other = arguments[sum(takewhile(bool, same)) :]  # a value that was converted in part
            assert not set(other) & set("<>|/｜"), (cut, arguments)


def test_a_mark_of_one_token_is_not_cut() -> None:
    """`<` at the end of a text is no beginning of it, and a mark at the end of a text that was not cut is text."""
    tokenizer = make_tokenizer()
    for text, beginnings in (("a <", tokenizer.beginnings), ("a <｜tool", None)):
        assert parse("deepseekv31", text, 2, beginnings=beginnings)[0] == text
    assert parse("hermes", "a <tool", 2, beginnings=tokenizer.beginnings)[0] == "a "


def test_all_formats_are_tested() -> None:
    aliases = {"glm": "glm45"}
    assert {aliases.get(name, name) for name in TOOL_FORMATS} == {case[0] for case in GOOD}


def test_solars_ids_are_kept() -> None:
    text = "<|tool_calls|>" + solar("a1b2", "f", "{}") + solar("", "g", "{}") + solar("a1b2", "g", "{}")
    ids = parse("solar_open", text, 3)[2]
    assert ids[0] == "a1b2" and len(set(ids)) == 3
    assert parse("solar_open", text, 3, is_json=True)[2][0] != "a1b2"


def test_kimis_ids_are_kept() -> None:
    assert parse("kimi_k2", KIMI.format(kimi("functions.f:7", "{}")), 3)[2] == ["functions.f:7"]


def test_kimis_ids_count_the_calls_of_the_conversation() -> None:
    def call(name: str, own_id: str) -> dict[str, Any]:
        return {"id": own_id, "type": "function", "function": {"name": name, "arguments": "{}"}}

    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call("f", "call_a"), call("g", "call_b")]},
        {"role": "tool", "tool_call_id": "call_b", "content": "1"},
        {"role": "tool", "tool_call_id": "call_a", "content": "2"},
        {"role": "assistant", "tool_calls": [call("f", "functions.f:0")]},
        {"role": "tool", "tool_call_id": "functions.f:0", "content": "3"},
        {"role": "tool", "tool_call_id": "other", "content": "4"},
    ]
    found = with_counted_ids(history)
    ids = [[c["id"] for c in m["tool_calls"]] if m.get("tool_calls") else m.get("tool_call_id") for m in found]
    assert ids == [None, ["functions.f:0", "functions.g:1"], "functions.g:1", "functions.f:0", ["functions.f:2"],
                   "functions.f:2", "other"]  # fmt: skip
    assert with_counted_ids(found) == found and history[1]["tool_calls"][0]["id"] == "call_a"
    text = KIMI.format(kimi("functions.f:0", "{}") + kimi("functions.g:0", "{}"))
    for enforced, wanted in ((True, ["functions.f:3", "functions.g:4"]), (False, ["functions.f:0", "functions.g:0"])):
        parser = ToolCallParser("kimi_k2", FUNCTIONS, is_json=enforced, first_call=num_calls(history))
        deltas = [*parser.push(text)[1], *parser.finish()[1]]
        assert [delta.id for delta in deltas if delta.id] == wanted


NO_CALLS = [
    ("qwen25", "<tool_call>oops</tool_call>"),
    ("qwen25", '<tool_call>{"nam'),
    ("qwen25", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("llama3", ' {"a": {"name": "f"}} text'),
    ("mistral", "[TOOL_CALLS] no call here"),
    ("mistral", "[TOOL_CALLS] [5]"),
    ("glm45", "<tool_call></tool_call>"),
    ("qwen3_coder", "<function=f"),
    ("pythonic", "[f(x=y)] [f(s='a'"),
    ("deepseekv31", "a <｜tool"),
    ("deepseekv31", f"a {CALLS_BEGIN}text{CALLS_END}"),
    ("deepseekv3", f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}f{CALL_END}"),
    ("deepseekv31", f"{CALLS_BEGIN}{CALL_BEGIN}f{CALL_END} {CALL_BEGIN}g{CALL_END}\n{CALLS_END}"),
    ("deepseekv32", "a\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke nam"),
    ("qwen3_coder", "<tool_call>\n<functio=f>\n</tool_call>"),
    ("qwen25", '<tool_call>{"nam": "f", "arguments": "a": 1}</tool_call>'),
    ("mistral", '[TOOL_CALLS] [{"nam": "f", "arguments": {}}] b'),
    ("mistral", "a[TOOL_CALLS]g[CALL_ID]xyz[AR"),
    ("minimax_m1", "a <tool_calls>\n</tool_calls>"),
    ("minimax_m1", "<tool_calls>[5]</tool_calls>"),
    ("minimax_m1", '<tool_calls>\n{"name": 5}\n</tool_calls>'),
    ("seed_oss", "<seed:tool_call>\n<functio=f>\n</seed:tool_call>"),
    ("minimax-m2", '<minimax:tool_call><invoke name=""></minimax:tool_call>'),
    ("minimax-m3", "a ]<]minimax[>[<tool_call>"),
    ("minimax-m3", "]<]minimax[>[ b"),
    ("hunyuan", "<tool_calls>\n[5]</tool_calls>"),
    ("hunyuan", "a <tool_calls>\n<tool_call>f"),
    ("hunyuan_a13b", '<tool_calls>[{"name": 5}]</tool_calls> b'),
    ("solar_open", "<|tool_calls|><|tool_call:begin|>0<|tool_call:name|>f"),
    ("dots", "<dots_function_call>\nsearch\n</dots_function_call>"),
    ("gpt-oss", "<|channel|>final<|message|>Hello<|return|>"),
    ("olmo3", "<function_calls>\nf(x)\n</function_calls>"),
    ("glm4", 'h\n{"s": 1}\n x f\n[1] f {}'),
    ("lfm2", "<|tool_call_start|>[f(x)]<|tool_call_end|>"),
    ("lfm2", '<|tool_call_start|>[{"name": "f", "arguments": 5}]<|tool_call_end|>'),
    ("lfm2", '<|tool_call_start|>[{"name": 5}, 7]<|tool_call_end|>'),
    ("granite", "<|tool_call|>[5] <tool_call>a"),
    ("nemotron_json", "<TOOLCALL>[5]</TOOLCALL>"),
    ("phi4_mini_json", "functools [x] functools.reduce"),
    ("cohere_command4", '<|START_ACTION|>[{"name": "f", "parameters": {}}]<|END_ACTION|>'),
    ("cohere_command4", "a <|START_ACTION|>[5]"),
    ("gemma4", "<|tool_call>f{}<tool_call|>"),
    ("gemma4", "a <|tool_call>call:f<tool_call|>"),
    ("gpt-oss", "a <|start|>assistant<|channel|>commentary to=functions.f"),
]


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_text_that_is_no_call_is_shown(form: str, text: str) -> None:
    for whole in (text, text + " \n kept words"):
        for size in (1, 3, len(whole)):
            shown, calls, _ = parse(form, whole, size)
            assert not calls and shown == whole


PIECES = sorted(
    {piece for case in GOOD for piece in case[1].replace(">", "> ").split(" ")} | {"", '"', "\\", "{", "}", "]", "\n"}
)


@settings(max_examples=examples(150))
@given(st.sampled_from(sorted(TOOL_FORMATS)), st.lists(st.sampled_from(PIECES), max_size=12), st.integers(1, 9))
def test_garbage(form: str, pieces: list[str], size: int) -> None:
    """No exception, and results that do not depend on the pieces."""
    text = "".join(pieces)
    assert parse(form, text, size)[:2] == parse(form, text, len(text) or 1)[:2]


@settings(max_examples=examples(150))
@given(st.sampled_from(GOOD), st.data())
def test_mutated_outputs(case: tuple[str, str, str, Any], data: st.DataObject) -> None:
    form, text = case[:2]
    at = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(at, min(len(text), at + 8)))
    text = text[:at] + data.draw(st.text(max_size=4)) + text[end:]
    assert parse(form, text, data.draw(st.integers(1, 9)))[:2] == parse(form, text, len(text) or 1)[:2]


WORDS = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=6)
TEXTS = st.text(st.sampled_from('ab1 \n"\\{}[],:<|>é😀'), max_size=9).filter(lambda text: '<|"|>' not in f"{text}<|")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=12,
)


def gemma_value(value: Any) -> str:
    """As the published template writes it, which prints numbers and None as Python does."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(gemma_value, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{gemma_value(value[key])}' for key in sorted(value))}}}"
    return str(value)


@settings(max_examples=examples(150))
@given(st.dictionaries(WORDS, VALUES, max_size=4), st.integers(1, 9))
def test_arguments_as_gemmas_template_writes_them(arguments: dict[str, Any], size: int) -> None:
    text = "a" + gemma(f"call:g{gemma_value(arguments)}") + gemma("call:f{}")
    shown, calls, _ = parse("gemma4", text, size)
    assert shown == "a" and [(name, json.loads(found)) for name, found in calls] == [("g", arguments), ("f", {})]


def test_a_long_argument_arrives_in_pieces() -> None:
    parser = ToolCallParser("qwen3_coder", FUNCTIONS)
    parser.push("<tool_call>\n<function=f>\n<parameter=s>\n")
    for word in ("one ", "two\n", "three "):
        _, deltas = parser.push(word)
        assert deltas and deltas[0].arguments


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_text_and_calls_keep_their_order(size: int) -> None:
    text = 'A<tool_call>\n{"name": "f", "arguments": {"s": "x"}}\n</tool_call>\nB<tool_call>{"name": "g"}</tool_call>C'
    parser, order = ToolCallParser("qwen25", FUNCTIONS), ""
    parts = [part for at in range(0, len(text), size) for part in parser.parts(text[at : at + size])]
    for part in parts + parser.last_parts():
        order += part if isinstance(part, str) else f"<{part.name}>" if part.name else ""
    assert "".join(order.split()) == "A<f>B<g>C"


KIMI_STRAY = [
    ("a<|tool_calls_section_end|> b<|tool_call_end|>", "a b", []),
    ("<|tool_calls_section_begin|><|tool_calls_section_end|>a", "a", []),
    ("<|tool_calls_section_begin|>a<|tool_calls_section_end|>", "a", []),
    ("<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0", "functions.f:0", []),
    ("<|tool_call_begin|>functions.f:0<|tool_call_end|>a", "functions.f:0a", []),
    ("<|tool_call_argument_begin|>{}", "{}", []),
    ("a" + kimi("functions.f:0", "{}") + "\n" + kimi("g:1", "{}") + "<|tool_calls_section_end|>b", "ab",
     [("f", "{}"), ("g", "{}")]),
    (KIMI.format(kimi("functions.f:0", "{}") + "<|tool_call_end|>" + kimi("functions.g:1", "{}")), "",
     [("f", "{}"), ("g", "{}")]),
    (KIMI.format("<|tool_call_begin|>" + kimi("functions.f:0", "{}")), "", [("f", "{}")]),
    (KIMI.format(kimi("functions.f:0", "{}").removesuffix("<|tool_call_end|>")) + "a", "a", [("f", "{}")]),
    (KIMI.format(kimi("functions.f:0", "{}").removesuffix("<|tool_call_end|>") + kimi("functions.g:1", "{}")), "",
     [("f", "{}"), ("g", "{}")]),
    (kimi("functions.f:0", "{}<|tool_call_argument_begin|>a"), "a", [("f", "{}")]),
    (KIMI.format(KIMI.format(kimi("functions.f:0", "{}"))), "", [("f", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "shown", "calls"), KIMI_STRAY)
def test_stray_markers_of_kimi_are_not_shown(text: str, shown: str, calls: list[tuple[str, str]]) -> None:
    for size in range(1, len(text) + 1):
        assert parse("kimi_k2", text, size)[:2] == (shown, calls), size


@settings(max_examples=examples(150))
@given(st.lists(st.sampled_from([*TOOL_FORMATS["kimi_k2"].markers, "functions.f:0", '{"s": 1}', "a", " "]), max_size=9))
def test_no_marker_of_kimi_is_ever_shown(pieces: list[str]) -> None:
    shown, calls, _ = parse("kimi_k2", "".join(pieces), 5)
    for text in (shown, *(arguments for _, arguments in calls)):
        assert not any(marker in text for marker in TOOL_FORMATS["kimi_k2"].markers)


def test_kimi_calls_with_one_number_have_different_ids() -> None:
    call = "<|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>"
    _, calls, ids = parse("kimi_k2", text, 9)
    assert calls == [("g", "{}"), ("g", "{}")] and ids[0] == "functions.g:0" and len(set(ids)) == 2
