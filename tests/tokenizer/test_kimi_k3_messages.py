"""Prompts of Kimi K3: the layout of every kind of message, order of results, refusals, and that parsers read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_engine.errors import InputError
from moe_engine.tokenizer.chat_template import load_chat_template
from moe_engine.tokenizer.kimi_k3 import KimiK3Chat
from moe_engine.tokenizer.reasoning import REASONING_FORMATS, reasoning_parser, starts_inside
from moe_engine.tokenizer.tool_calls import ToolCallParser
from tests.tokenizer.read_calls import read_calls

END = "<|close|>message<|sep|><|end_of_msg|>"
ANSWER = '<|open|>message role="assistant"<|sep|>'
USER = f'<|open|>message role="user"<|sep|>hi{END}'
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def system(text: str, kind: str) -> str:
    return f'<|open|>message role="system" type="{kind}"<|sep|>{text}{END}'


def effort(value: str) -> str:
    return system(
        "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
        "supported values include `low`, `medium`, `high`, and `max`.\n"
        f"Now the system is invoked with `thinking_effort={value}`.",
        "thinking-effort",
    )


def call(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


@pytest.mark.parametrize(
    ("kwargs", "want"),
    [
        ({}, f"{effort('max')}{USER}{ANSWER}<|open|>think<|sep|>"),
        ({"reasoning_effort": "low"}, f"{effort('low')}{USER}{ANSWER}<|open|>think<|sep|>"),
        ({"enable_thinking": False}, f"{USER}{ANSWER}<|open|>response<|sep|>"),
        ({"reasoning_effort": "none"}, f"{USER}{ANSWER}<|open|>response<|sep|>"),
        ({"thinking": True, "enable_thinking": False, "thinking_effort": "high", "reasoning_effort": "low"},
         f"{effort('high')}{USER}{ANSWER}<|open|>think<|sep|>"),
    ],
)  # fmt: skip
def test_openings(kwargs: dict[str, Any], want: str) -> None:
    assert KimiK3Chat().render(HI, kwargs=kwargs) == want
    assert starts_inside("kimi_k3", want, kwargs) == want.endswith("think<|sep|>")


def test_tools_calls_and_results() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "a": None}}}]
    arguments = {"s": 'a "b"', "n": 1.5, "l": [1], "o": {"k": None}, "b": True, "z": None}
    calls = [call("f", arguments, "x"), call('g"&', {}, "y")]
    messages = [
        *HI,
        {"role": "assistant", "content": "so", "reasoning_content": "why", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "y", "content": "second"},
        {"role": "tool", "tool_call_id": "x", "content": "first"},
    ]
    declared = '[{"function":{"name":"f","parameters":{"a":null,"type":"object"}},"type":"function"}]'
    head = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
    typed = (("s", "string", 'a "b"'), ("n", "number", "1.5"), ("l", "array", "[1]"), ("o", "object", '{"k": null}'),
             ("b", "boolean", "true"), ("z", "null", "null"))  # fmt: skip
    written = "".join(
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        for key, kind, value in typed
    )
    answer = (
        "<|open|>think<|sep|>why<|close|>think<|sep|><|open|>response<|sep|>so<|close|>response<|sep|>"
        f'<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>{written}<|close|>call<|sep|>'
        '<|open|>call tool="g&quot;&amp;" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    )
    results = (
        f'<|open|>message role="tool" tool="f" index="1"<|sep|>first{END}'
        f'<|open|>message role="tool" tool="g&quot;&amp;" index="2"<|sep|>second{END}'
    )
    got = KimiK3Chat().render(messages, tools=tools, add_generation_prompt=False)
    tools_text = system(f"{head}{declared}\n```", "tool-declare")
    assert got == f"{tools_text}{effort('max')}{USER}{ANSWER}{answer}{END}{results}"
    parser = reasoning_parser(REASONING_FORMATS["kimi_k3"], inside=False)
    reasoning, content = parser.push(answer + END.removesuffix("<|end_of_msg|>"))
    assert reasoning == "why"
    text, found, _ = read_calls(ToolCallParser("kimi_k3", None), content, 7)
    assert text == "so" and (found[0][0], json.loads(found[0][1])) == ("f", arguments)


def test_the_beginning_of_an_answer() -> None:
    chat, message = KimiK3Chat(), {"content": "so", "reasoning_content": "why"}
    assert chat.begun(message) == "why<|close|>think<|sep|><|open|>response<|sep|>so"
    assert chat.begun(message, {"thinking": False}) == "so" and chat.begun({"content": ""}) == ""


@pytest.mark.parametrize(
    ("messages", "kwargs", "message"),
    [
        ([{"role": "critic", "content": "x"}], {}, r"messages\[0\].role: 'critic' is unknown to Kimi K3"),
        (HI, {"reasoning_effort": "medium"}, "reasoning_effort: 'medium' is unknown to Kimi K3; use none, low, high"),
        ([*HI, {"role": "tool", "tool_call_id": "x", "content": "r"}], {}, r"messages\[1\].tool_call_id: no call"),
        ([{"role": "assistant", "content": "", "tool_calls": [call("f", [1], "x")]}], {}, "must be a JSON object"),
        (HI, {"tools": []}, "chat_template_kwargs.tools: is set by the server"),
    ],
)
def test_refusals(messages: list[dict[str, Any]], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        KimiK3Chat().render(messages, kwargs=kwargs)


def test_checkpoints_without_a_template(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k3"}))
    found = load_chat_template(None, None, {}, tmp_path)
    assert isinstance(found, KimiK3Chat) and found.parsers == ("kimi_k3", "kimi_k3")
    assert isinstance(load_chat_template("kimi-k3", None, {}), KimiK3Chat)
