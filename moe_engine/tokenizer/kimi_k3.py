"""Prompts of Kimi K3, whose checkpoints have no Jinja template: the layout of the vendor's message encoder (XTML).

A message is `<|open|>message role="..."<|sep|>`, its text, `<|close|>message<|sep|><|end_of_msg|>`. An answer has the
channels `think` (also without reasoning; none with thinking off), `response`, and `tools` with a tag for each call and
each argument. Tools and the effort come first, as messages of the system with a `type`. Results of tools are in the
order of the calls. A prompt ends inside the first channel of the answer.

Source: `encoding_k3.py` in the checkpoint of Kimi K3, for the layout and the fixed texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_engine.errors import InputError
from moe_engine.tokenizer.chat_messages import ChatEncoder, prepare_message, refuse_reserved
from moe_engine.tokenizer.xtml import CLOSE, OPEN, RESPONSE, SEP, THINK, THINK_END, closed, opened

END = "<|end_of_msg|>"
IMAGE = "<|media_begin|><|media_content|><|media_pad|><|media_end|>"
EFFORTS = ("low", "high", "max")
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TYPES = {bool: "boolean", type(None): "null", int: "number", float: "number", str: "string", dict: "object"}


@dataclass(frozen=True)
class KimiK3Chat(ChatEncoder):
    """Writes prompts as a chat template does."""

    reads_parts = True
    parsers = ("kimi_k3", "kimi_k3")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """See `ChatEncoder`. `thinking` or `enable_thinking` in `kwargs` (default: true), `thinking_effort` or
        `reasoning_effort` (one of `EFFORTS`, or none: no thinking; default: max).

        Raises:
            InputError: an unknown role or effort, arguments that are no object, a result without a call.
        """
        refuse_reserved(kwargs)
        effort, out, calls = _effort(kwargs), list[str](), list[Mapping[str, Any]]()
        if tools:
            out.append(_message(_TOOLS.format(_compact(list(tools))), role="system", type="tool-declare"))
        if effort is not None:
            out.append(_message(_EFFORT.format(effort), role="system", type="thinking-effort"))
        results: list[tuple[int, str]] = []
        for i, raw in enumerate(messages):
            turn = prepare_message(raw, keep_parts=True)
            turn["content"] = _text(turn["content"])
            role = "system" if turn["role"] == "developer" else turn["role"]
            if role != "tool":
                out += _in_order(results)
                results = []
            if role in ("system", "user"):
                out.append(_message(turn["content"], role=role, name=turn.get("name")))
            elif role == "assistant":
                calls = turn.get("tool_calls", [])
                out.append(_message(_answer(turn, effort is not None, i), role=role, name=turn.get("name")))
            elif role == "tool":
                results.append(_result(turn, calls, len(results), i))
            else:
                where = f"messages[{i}].role"
                known = "system, developer, user, assistant or tool"
                raise InputError.at(where, f"{role!r:.40} is unknown to Kimi K3; use {known}")
        out += _in_order(results)
        if add_generation_prompt:
            out.append(_tag("message", role="assistant") + (RESPONSE if effort is None else THINK))
        return "".join(out)

    def begun(self, message: Mapping[str, Any], kwargs: Mapping[str, Any] | None = None) -> str:
        """The beginning of an answer: with thinking, the reasoning and its end come first. Without content the
        reasoning continues."""
        content: str = message["content"]
        reasoning = message.get("reasoning_content") or ""
        if _effort(kwargs) is None:
            return content
        return f"{reasoning}{THINK_END}{RESPONSE}{content}" if content else reasoning


def load_kimi_k3(folder: Path | None, special_tokens: Mapping[str, str]) -> KimiK3Chat:
    """The encoder; it reads nothing from the checkpoint."""
    return KimiK3Chat()


def _text(content: Any) -> Any:
    """Parts of a content as one text, images as placeholders; their sizes are written when they are read."""
    if not isinstance(content, list):
        return content
    return "".join(IMAGE if part["type"] == "image" else part["text"] for part in content)


def _effort(kwargs: Mapping[str, Any] | None) -> str | None:
    """The effort of thinking; None: no thinking."""
    options = kwargs or {}
    if not options.get("thinking", options.get("enable_thinking", True)):
        return None
    name = "thinking_effort" if options.get("thinking_effort") is not None else "reasoning_effort"
    effort = options.get(name)
    if effort == "none":
        return None
    if effort is not None and effort not in EFFORTS:
        raise InputError.at(name, f"{effort!r:.40} is unknown to Kimi K3; use none, {', '.join(EFFORTS)}")
    return effort or "max"


def _tag(tag: str, /, **attributes: Any) -> str:
    written = (
        f' {key}="{str(value).replace("&", "&amp;").replace(chr(34), "&quot;")}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"{OPEN}{tag}{''.join(written)}{SEP}"


def _message(text: str, /, **attributes: Any) -> str:
    return f"{_tag('message', **attributes)}{text}{closed('message')}{END}"


def _answer(turn: Mapping[str, Any], thinks: bool, i: int) -> str:
    reasoning = f"{THINK}{turn.get('reasoning_content') or ''}{THINK_END}" if thinks else ""
    text = f"{reasoning}{RESPONSE}{turn.get('content') or ''}{closed('response')}"
    calls = [_call(call, j, f"messages[{i}].tool_calls[{j}]") for j, call in enumerate(turn.get("tool_calls", []))]
    return f"{text}{opened('tools')}{''.join(calls)}{closed('tools')}" if calls else text


def _call(call: Mapping[str, Any], j: int, place: str) -> str:
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, dict):
        where = f"{place}.function.arguments"
        raise InputError.at(where, "must be a JSON object")
    written = []
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        written.append(f"{_tag('argument', key=key, type=_TYPES.get(type(value), 'array'))}{text}{closed('argument')}")
    return f"{_tag('call', tool=call['function']['name'], index=j + 1)}{''.join(written)}{CLOSE}call{SEP}"


def _result(turn: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], given: int, i: int) -> tuple[int, str]:
    """A result's place among those of the answer, from 1 on, and its message."""
    asked = turn.get("tool_call_id")
    place = next((j for j, call in enumerate(calls) if asked is not None and call.get("id") == asked), given)
    name = calls[place]["function"]["name"] if place < len(calls) else turn.get("name")
    if name is None:
        where = f"messages[{i}].tool_call_id"
        raise InputError.at(where, "no call of the answer before it has this id; give `name`")
    return place + 1, _message(turn["content"], role="tool", tool=name, index=place + 1)


def _in_order(results: Sequence[tuple[int, str]]) -> list[str]:
    return [text for _, text in sorted(results, key=lambda result: result[0])]


def _compact(tools: Any) -> str:
    return json.dumps(tools, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
