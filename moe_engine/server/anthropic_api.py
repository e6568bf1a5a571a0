"""/v1/messages: Anthropic's form of chat, over the chat endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moe_engine.frontend.generation import Generation, Piece
from moe_engine.server.anthropic_prompt import NAMES, chat_request
from moe_engine.server.anthropic_types import AnthropicUsage, CountRequest, MessagesRequest, OutputBlock, TokenCount
from moe_engine.server.bodies import Plan
from moe_engine.server.errors import anthropic_body, stream_error
from moe_engine.server.event_stream import Events, EventStream, named_event
from moe_engine.server.field_names import named
from moe_engine.server.http_io import cancel_on_disconnect, decode_body, encode_json, json_response
from moe_engine.server.openai.chat import ChatApi
from moe_engine.server.openai.choice import ChoiceParser, ParserOptions
from moe_engine.server.openai.common import matched_stop
from moe_engine.server.output_parts import Change, OutputParts, Part, parts_of
from moe_engine.server.state import ServerState
from moe_engine.tokenizer.reasoning import REASONING_FORMATS
from moe_engine.validation import refuse_unavailable

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {
    "text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}  # fmt: skip


class AnthropicApi:
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._chat = ChatApi(state)

    async def messages(self, request: Request) -> Response:
        """Anthropic's messages."""
        plan = await self._state.bodies.plan(request, "messages")
        stream, max_tokens, model, parsers = plan.options
        with named(NAMES):
            begun = self._state.frontend.begin(plan.read, self._state.token_json.chat)
            job = await cancel_on_disconnect(request, begun)
        if stream:
            events = _Events(model, parsers, max_tokens)
            return EventStream(self._state.frontend, job, events, anthropic_body)
        await cancel_on_disconnect(request, self._state.frontend.collect(job))
        g, parser = job.generations[0], ChoiceParser(parsers)
        content = [_block(part) for part in parts_of(parser, g)]
        stop = _stop(parser.finish_reason(g.finish), g, max_tokens)
        return json_response(_message(g, model, content, stop, _usage(g, parsers)))

    def read(self, body: bytes | bytearray) -> Plan:
        """`Plan.options`: whether to stream, `max_tokens`, the model's name, `ParserOptions`."""
        asked = decode_body(body, MessagesRequest)
        refuse_unavailable(asked)
        with named(NAMES):
            chat = chat_request(asked, limits_thinking=limits_thinking(self._state))
            plan = self._chat.plan(*chat, reduce_length=True)
        return Plan(plan.read, (bool(asked.stream), asked.max_tokens, *plan.options[1:]))

    async def count_tokens(self, request: Request) -> Response:
        """Tokens of the prompt of messages."""
        return await self._state.bodies.answer(request, "count_tokens")

    def counted(self, body: bytes | bytearray) -> Iterator[bytes]:
        asked = decode_body(body, CountRequest)
        with named(NAMES):
            count: TokenCount = {"input_tokens": self._chat.num_tokens(*chat_request(asked))}
        yield encode_json(count)


def limits_thinking(state: ServerState) -> bool:
    """Whether the server can end a reasoning: it has a reasoning parser whose tags are tokens of the vocabulary."""
    name, tokenizer = state.flags.reasoning_parser, state.frontend.tokenizer
    if name is None or tokenizer is None:
        return False
    form = REASONING_FORMATS[name]
    return all(tokenizer.token_id(tag) is not None for tag in (form.start, form.free_end))


class _Events(Events):
    """Events of a stream."""

    def __init__(self, model: str, parsers: ParserOptions, max_tokens: int) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._parsers = parsers
        self._parser = ChoiceParser(parsers)
        self._parts = OutputParts(self._parser)
        self._started = False

    def of(self, piece: Piece) -> bytes:
        return b"".join(self._of(piece))

    def _of(self, piece: Piece) -> Iterator[bytes]:
        g = piece.generation
        if not self._started:
            self._started = True
            empty = _message(g, self._model, [], (None, None), _usage(g, self._parsers, begins=True))
            yield named_event("message_start", message=empty)
        for change in self._parts.push(piece):
            yield _change(*change)
        if piece.finish is not None:
            reason, sequence = _stop(self._parser.finish_reason(piece.finish), g, self._max_tokens)
            delta = {"stop_reason": reason, "stop_sequence": sequence}
            yield named_event("message_delta", delta=delta, usage=_usage(g, self._parsers))
            yield named_event("message_stop")

    def failed(self, error: Exception) -> bytes:
        return stream_error(error, anthropic_body)


def _block(part: Part, *, begins: bool = False) -> OutputBlock:
    """The block of a part; `begins`: its form at the start of a stream, without its text."""
    text = "" if begins else part.text
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if part.kind == "text":
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": {} if begins else _arguments(text)}


def _arguments(text: str) -> Any:
    """The arguments of a call, as the model wrote them. Text that is not JSON is put into an object."""
    try:
        msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {"invalid_json": text}
    return msgspec.Raw((text or "{}").encode())


def _change(change: Change, part: Part, text: str) -> bytes:
    if change == "begin":
        return named_event("content_block_start", index=part.index, content_block=_block(part, begins=True))
    if change == "end":
        return named_event("content_block_stop", index=part.index)
    kind, name = DELTAS[part.kind]
    return named_event("content_block_delta", index=part.index, delta={"type": kind, name: text})


def _stop(reason: str | None, g: Generation, max_tokens: int) -> tuple[str | None, str | None]:
    """Anthropic's reason and the stop sequence. A `max_tokens` beyond the context length ends at the latter."""
    matched = matched_stop(g.finish)
    if reason == "stop" and isinstance(matched, str):
        return "stop_sequence", matched
    if reason == "length" and len(g.output_ids) < max_tokens:
        return "model_context_window_exceeded", None
    return STOP_REASONS.get(reason or "", reason), None


def _usage(g: Generation, parsers: ParserOptions, begins: bool = False) -> AnthropicUsage:
    """`begins`: before the first token."""
    ids = [] if begins else g.output_ids
    return {
        "input_tokens": len(g.prompt_ids) - g.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": g.cached_tokens,
        "output_tokens": len(ids),
        "output_tokens_details": {"thinking_tokens": parsers.count_reasoning(ids)},
    }


def _message(
    g: Generation, model: str, content: list[OutputBlock], stop: tuple[str | None, str | None], usage: AnthropicUsage
) -> dict[str, Any]:
    return {
        "id": g.rid if g.rid.startswith("msg_") else f"msg_{g.rid}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop[0],
        "stop_sequence": stop[1],
        "usage": usage,
    }
