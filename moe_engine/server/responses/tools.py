"""Tools of /v1/responses as functions of chats, and calls of them as items.

Chats have functions alone. A function of a namespace has the name `NAMESPACE__NAME` there, as in vLLM. A custom tool,
whose input is free text, is a function with this text as its one argument, as in SGLang and vLLM.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from moe_engine.errors import InputError
from moe_engine.validation import string_at

logger = logging.getLogger("moe_engine")

NO_EFFECT = frozenset({"web_search", "web_search_preview", "image_generation"})
"""Tools of OpenAI's servers that coding agents offer without being asked to."""
INPUT = "input"
INPUT_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
_reported: set[str] = set()


class Called(NamedTuple):
    """A tool as the client knows it."""

    kind: str
    name: str
    namespace: str | None = None

    @property
    def is_custom(self) -> bool:
        return self.kind == "custom"

    @property
    def chat_name(self) -> str:
        return f"{self.namespace}__{self.name}" if self.namespace else self.name


def chat_tools(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Raises InputError: a tool that is not available; names its field."""
    return [_function(tool, called) for tool, called in _callable(tools)]


def called_tools(tools: Iterable[Mapping[str, Any]]) -> dict[str, Called]:
    """The tools of a valid request by their names in the chat."""
    return {called.chat_name: called for _, called in _callable(tools)}


def chat_choice(choice: Any) -> Any:
    """A tool of `tool_choice` in the form of chats, whose names are one level deeper."""
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom"):
        return choice
    name, namespace = choice.get("name"), choice.get("namespace")
    found = Called("", name, namespace).chat_name if isinstance(name, str) and isinstance(namespace, str) else name
    return {"type": "function", "function": {"name": found}}


def chat_call(item: Mapping[str, Any], field: str) -> dict[str, Any]:
    """An item with a call in the form of chats. Raises InputError: names the field of the item."""
    name, namespace = string_at(item, "name", field), item.get("namespace")
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({INPUT: string_at(item, INPUT, field)}, ensure_ascii=False)
    else:
        arguments = string_at(item, "arguments", field)
    function = {"name": Called("", name, namespace).chat_name, "arguments": arguments}
    return {"id": string_at(item, "call_id", field), "type": "function", "function": function}


def custom_input(arguments: str) -> str:
    """The text in the arguments of a custom tool's call; the arguments themselves if they are cut or have none."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = found.get(INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


def _callable(tools: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Called]]:
    """Functions and custom tools, also those of namespaces."""
    for i, tool in enumerate(tools):
        field, kind = f"tools[{i}]", tool["type"]
        if kind == "namespace":
            space = string_at(tool, "name", field)
            for j, inner in enumerate(tool.get("tools", ())):
                yield inner, _called(inner, f"{field}.tools[{j}]", space)
        elif kind not in NO_EFFECT:
            yield tool, _called(tool, field)
        elif kind not in _reported:
            _reported.add(kind)
            logger.warning("A request offers the tool %r of OpenAI's servers, which has no effect", kind)


def _called(tool: Mapping[str, Any], field: str, namespace: str | None = None) -> Called:
    if tool["type"] not in ("function", "custom"):
        words = "is a tool of OpenAI's servers, which is not available; send functions"
        raise InputError.at(f"{field}.type", f"{tool['type']!r:.60} {words}")
    return Called(tool["type"], string_at(tool, "name", field), namespace)


def _function(tool: Mapping[str, Any], called: Called) -> dict[str, Any]:
    fields = {name: tool.get(name) for name in ("description", "parameters", "strict")}
    if called.is_custom:
        shown = [fields["description"] or "", _syntax(tool.get("format") or {})]
        fields = {"description": "\n\n".join(filter(None, shown)) or None, "parameters": INPUT_SCHEMA}
    given = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": {"name": called.chat_name, **given}}


def _syntax(form: Mapping[str, Any]) -> str:
    """The grammar of a custom tool's input, for the model to read."""
    if form.get("type") != "grammar":
        return ""
    return f"The input is a text of this {form.get('syntax')} grammar:\n{form.get('definition')}"
