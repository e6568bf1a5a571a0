"""Parser endpoints: /separate_reasoning and /parse_function_call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from fastapi import Request, Response

from moe_engine.errors import InputError
from moe_engine.server.http_io import encode_json
from moe_engine.server.openai_messages import check_tools
from moe_engine.server.state import ServerState
from moe_engine.tokenizer.reasoning import REASONING_FORMATS, ReasoningParser
from moe_engine.tokenizer.tool_calls import TOOL_FORMATS, ToolCallParser


class ParseApi:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def separate_reasoning(self, request: Request) -> Response:
        return await self._state.bodies.answer(request, "separate_reasoning")

    def separated(self, body: dict[str, Any]) -> Iterator[bytes]:
        """{text, reasoning_parser} -> {reasoning_text, text}."""
        name = _choice(body, "reasoning_parser", self._state.flags.reasoning_parser, tuple(REASONING_FORMATS))
        form = REASONING_FORMATS[name]
        parser = ReasoningParser(inside=form.forced, form=form)
        pieces = [parser.push(_text(body)), parser.finish()]
        yield encode_json(
            {"reasoning_text": "".join(r for r, _ in pieces), "text": "".join(content for _, content in pieces)}
        )

    async def parse_function_call(self, request: Request) -> Response:
        return await self._state.bodies.answer(request, "parse_function_call")

    def parsed(self, body: dict[str, Any]) -> Iterator[bytes]:
        """{text, tools, tool_call_parser} -> {normal_text, calls: [{tool_index, name, parameters}]}."""
        name = _choice(body, "tool_call_parser", self._state.flags.tool_call_parser, tuple(TOOL_FORMATS))
        tools = body.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise InputError("tools: expected a list of objects", field="tools")
        parser = ToolCallParser(name, {tool["function"]["name"] for tool in check_tools(tools)})
        shown = ""
        calls: list[dict[str, Any]] = []
        for text, deltas in (parser.push(_text(body)), parser.finish()):
            shown += text
            for delta in deltas:
                if delta.name is not None:
                    calls.append({"tool_index": delta.index, "name": delta.name, "parameters": ""})
                calls[delta.index]["parameters"] += delta.arguments
        yield encode_json({"normal_text": shown, "calls": calls})


def _text(body: dict[str, Any]) -> str:
    text = body.get("text")
    if not isinstance(text, str):
        raise InputError("text: expected a string", field="text")
    return text


@lru_cache
def _unsupported(field: str) -> frozenset[str]:
    """Values that the flag of the same name knows and that are not implemented yet."""
    from moe_engine.config.field import fields_of  # lazy: the package imports numpy
    from moe_engine.config.server import ServerArgs

    return frozenset(next(info.flag.unsupported for info in fields_of(ServerArgs) if info.name == field))


def _choice(body: dict[str, Any], field: str, default: str | None, known: tuple[str, ...]) -> str:
    name = body.get(field, default)
    if name in _unsupported(field):
        raise InputError(
            f"{field}: {name!r:.40} is not available yet in moe-engine; choose one of {', '.join(known)}", field=field
        )
    if name not in known:
        raise InputError(f"{field}: choose one of {', '.join(known)}, got {name!r:.40}", field=field)
    return str(name)
