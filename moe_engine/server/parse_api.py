"""Parser endpoints: /separate_reasoning and /parse_function_call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from starlette.requests import Request
from starlette.responses import Response

from moe_engine.errors import InputError
from moe_engine.server.http_io import decode_body, encode_json
from moe_engine.server.native_types import (
    ParsedCalls,
    ParseFunctionCallRequest,
    SeparatedReasoning,
    SeparateReasoningRequest,
)
from moe_engine.server.state import ServerState
from moe_engine.tokenizer.reasoning import REASONING_FORMATS, reasoning_parser
from moe_engine.tokenizer.tool_calls import TOOL_FORMATS, ToolCallParser, parameters_of


class ParseApi:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def separate_reasoning(self, request: Request) -> Response:
        """Separates reasoning from content."""
        return await self._state.bodies.answer(request, "separate_reasoning")

    def separated(self, body: bytes | bytearray) -> Iterator[bytes]:
        asked = decode_body(body, SeparateReasoningRequest)
        default = self._state.flags.reasoning_parser
        name = _choice("reasoning_parser", asked.reasoning_parser or default, tuple(REASONING_FORMATS))
        form = REASONING_FORMATS[name]
        parser = reasoning_parser(form, inside=form.forced)
        reasoning, content = zip(parser.push(asked.text), parser.finish())
        answer: SeparatedReasoning = {"reasoning_text": "".join(reasoning), "text": "".join(content)}
        yield encode_json(answer)

    async def parse_function_call(self, request: Request) -> Response:
        """Parses tool calls in a text."""
        return await self._state.bodies.answer(request, "parse_function_call")

    def parsed(self, body: bytes | bytearray) -> Iterator[bytes]:
        asked = decode_body(body, ParseFunctionCallRequest)
        default = self._state.flags.tool_call_parser
        name = _choice("tool_call_parser", asked.tool_call_parser or default, tuple(TOOL_FORMATS))
        parser = ToolCallParser(name, parameters_of(asked.tools))
        answer: ParsedCalls = {"normal_text": "", "calls": []}
        calls = answer["calls"]
        for text, deltas in (parser.push(asked.text), parser.finish()):
            answer["normal_text"] += text
            for delta in deltas:
                if delta.name is not None:
                    calls.append({"tool_index": delta.index, "name": delta.name, "parameters": ""})
                calls[delta.index]["parameters"] += delta.arguments
        yield encode_json(answer)


@lru_cache
def _unsupported(field: str) -> frozenset[str]:
    """Values that the flag of the same name has and that are not implemented yet."""
    from moe_engine.config.field import fields_of  # lazy: the package imports numpy
    from moe_engine.config.server import ServerArgs

    return frozenset(next(info.flag.unsupported for info in fields_of(ServerArgs) if info.name == field))


def _choice(field: str, name: str | None, known: tuple[str, ...]) -> str:
    if name in _unsupported(field):
        raise InputError.at(field, f"{name!r:.40} is not available yet in moe-engine; choose one of {', '.join(known)}")
    if name is None or name not in known:
        raise InputError.at(field, f"choose one of {', '.join(known)}, got {name!r:.40}")
    return name
