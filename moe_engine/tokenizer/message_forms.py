"""Forms of a conversation for chat templates: transformers' first, then those of templates that cannot read it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from moe_engine.tokenizer.chat_messages import map_arguments

_REASONING = ("reasoning_content", "thinking")
"""Fields in which templates read reasoning; gpt-oss's reads the second."""


def continued_fields(message: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of the text that is continued: without content those of the reasoning."""
    reasoning = tuple(name for name in _REASONING if message.get(name))
    return reasoning if reasoning and not message["content"] else ("content",)


def message_forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The conversation as transformers passes it to templates, then the forms that other templates need: arguments as
    text, which DeepSeek's concatenate; a content beside calls that is null, which DeepSeek-R1's tests, or empty, which
    Qwen3's divides; content beside calls without reasoning, of which gpt-oss's takes only one."""
    tried: list[list[dict[str, Any]]] = []
    for changes in product(
        (None, _without_thinking), (None, _null_content, _empty_content), (None, _arguments_as_text)
    ):
        form = [_as_transformers(message) for message in messages]
        for change in changes:
            form = form if change is None else [change(m) if m.get("tool_calls") else m for m in form]
        if form not in tried:
            tried.append(form)
            yield form


def _as_transformers(message: dict[str, Any]) -> dict[str, Any]:
    """Without fields that are null, which templates would write as None; the reasoning in both of its fields."""
    found = {name: value for name, value in message.items() if value is not None}
    reasoning = next((found[name] for name in _REASONING if name in found), None)
    return found if reasoning is None else {"thinking": reasoning, **found, "reasoning_content": reasoning}


def _without_thinking(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "thinking"}


def _null_content(message: dict[str, Any]) -> dict[str, Any]:
    return {"content": None, **message}


def _empty_content(message: dict[str, Any]) -> dict[str, Any]:
    return {"content": "", **message}


def _arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "tool_calls": [map_arguments(call, _arguments_text) for call in message["tool_calls"]]}


def _arguments_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
