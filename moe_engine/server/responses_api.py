"""/v1/responses: OpenAI's newer form of chat, over the chat endpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from moe_engine.errors import InputError
from moe_engine.frontend.encoding import check_kind
from moe_engine.frontend.generation import Generation, Piece
from moe_engine.server.bodies import PROCESS_BYTES, Plan
from moe_engine.server.errors import openai_body, problem_of
from moe_engine.server.event_stream import EventStream
from moe_engine.server.field_names import named
from moe_engine.server.http_io import cancel_on_disconnect, decode_body, encode_json, json_response
from moe_engine.server.openai_chat import ChatApi
from moe_engine.server.openai_choice import ChoiceParser, ParserOptions
from moe_engine.server.output_parts import Change, OutputParts, Part, parts_of
from moe_engine.server.responses_prompt import NAMES, chat_request, input_messages, output_message, repeated_fields
from moe_engine.server.responses_store import ResponseStore
from moe_engine.server.responses_types import (
    DeletedResponse,
    OutputContent,
    OutputItem,
    ResponseObject,
    ResponsesPlan,
    ResponsesRequest,
    ResponseUsage,
)
from moe_engine.server.state import ServerState
from moe_engine.validation import refuse_unavailable

PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
TEXT_EVENTS = {"reasoning": "reasoning_text", "text": "output_text"}


class ResponsesApi:
    """
    Args:
        store: None in the processes of large bodies, which have no stored responses.
    """

    def __init__(self, state: ServerState, store: ResponseStore | None) -> None:
        self._state = state
        self._chat = ChatApi(state)
        self._store = store

    async def create(self, request: Request) -> Response:
        """A response, with the conversation that it continues."""
        plan = await self._state.bodies.plan(request, "responses")
        asked, model, parsers = plan.options
        with named(NAMES):
            job = await self._state.frontend.begin(plan.read, self._state.token_json.chat)
        answer = _Answer(job.generations[0], asked, model, parsers)
        if asked.stream:
            return EventStream(self._state.frontend, job, _Events(answer, self._keep), openai_body)
        await cancel_on_disconnect(request, self._state.frontend.collect(job))
        response = answer.ended([_item(answer.id, part) for part in parts_of(answer.parser, job.generations[0].text)])
        self._keep(answer, response)
        return json_response(response)

    def read(self, body: bytes | bytearray) -> Plan:
        """`Plan.options`: `ResponsesPlan`, the model's name, `ParserOptions`."""
        check_kind(self._state.client.info, pooled=False)
        req = decode_body(body, ResponsesRequest)
        refuse_unavailable(req)
        messages = [*self._previous(req), *input_messages(req)]
        with named(NAMES):
            plan = self._chat.plan(*chat_request(req, messages))
        _, model, parsers = plan.options
        stores = req.store is not False
        asked = ResponsesPlan(bool(req.stream), stores, repeated_fields(req), messages if stores else [])
        return Plan(plan.read, (asked, model, parsers))

    def _previous(self, req: ResponsesRequest) -> list[dict[str, Any]]:
        if req.previous_response_id is None:
            return []
        if self._store is None:
            words = f"bodies above {PROCESS_BYTES} bytes cannot continue a stored response; send the whole conversation"
            raise InputError(f"previous_response_id: {words} as input", field="previous_response_id")
        return self._store.messages(req.previous_response_id)

    def _keep(self, answer: _Answer, response: ResponseObject) -> None:
        if answer.asked.store and self._store is not None and response["status"] != "failed":
            self._store.put(response, [*answer.asked.messages, output_message(response["output"])])

    # -- stored responses

    async def retrieve(self, request: Request) -> Response:
        """A stored response."""
        assert self._store is not None
        return Response(self._store.response(request.path_params["response_id"]), media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Deletes a stored response."""
        assert self._store is not None
        name = request.path_params["response_id"]
        self._store.delete(name)
        answer: DeletedResponse = {"id": name, "object": "response.deleted", "deleted": True}
        return json_response(answer)


class _Events:
    """Events of the parts, between those of the whole response. A failure after the first event ends the stream with
    `response.failed`; a failure before it is an HTTP error."""

    def __init__(self, answer: _Answer, keep: Callable[[_Answer, ResponseObject], None]) -> None:
        self._answer = answer
        self._keep = keep
        self._stream = _Stream(answer.id)
        self._parts = OutputParts()
        self._begun = False

    def of(self, piece: Piece) -> bytes:
        return b"".join(self._of(piece))

    def _of(self, piece: Piece) -> Iterator[bytes]:
        answer, stream = self._answer, self._stream
        if not self._begun:
            self._begun = True
            for name in ("created", "in_progress"):
                yield stream.event(f"response.{name}", response=answer.response("in_progress", []))
        deltas = answer.parser.push(piece.text)
        ends = piece.finish is not None
        for change in self._parts.push(deltas + (answer.parser.finish() if ends else [])):
            yield from stream.events(*change)
        if ends:
            for change in self._parts.close():
                yield from stream.events(*change)

    def end(self) -> bytes:
        response = self._answer.ended(self._items())
        self._keep(self._answer, response)
        return self._stream.event(f"response.{response['status']}", response=response)

    def around_text(self, generation: Generation) -> None:
        return None  # every event has a name or a number

    def failed(self, error: Exception) -> bytes:
        response = self._answer.failed(self._items(), problem_of(error).message)
        return self._stream.event("response.failed", response=response)

    def _items(self) -> list[OutputItem]:
        return [_item(self._answer.id, part) for part in self._parts.parts]


class _Answer:
    """A response whose output is being generated."""

    def __init__(self, g: Generation, asked: ResponsesPlan, model: str, parsers: ParserOptions) -> None:
        self.asked = asked
        self.parser = ChoiceParser(parsers)
        self.id = g.rid if g.rid.startswith("resp_") else f"resp_{g.rid}"
        self._generation, self._parsers, self._model = g, parsers, model
        self._created = int(time.time())

    def response(self, status: Any, output: list[OutputItem]) -> ResponseObject:
        answer: Any = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": output,
            "usage": None if status == "in_progress" else self._usage(),
            **self.asked.fields,
        }
        return cast(ResponseObject, answer)

    def ended(self, output: list[OutputItem]) -> ResponseObject:
        finish = self._generation.finish or {}
        if finish.get("type") == "abort":
            return self.failed(output, finish.get("message") or "the request was aborted")
        if finish.get("type") != "length":
            return self.response("completed", output)
        if output:
            output[-1]["status"] = "incomplete"
        return {**self.response("incomplete", output), "incomplete_details": {"reason": "max_output_tokens"}}

    def failed(self, output: list[OutputItem], message: str) -> ResponseObject:
        return {**self.response("failed", output), "error": {"code": "server_error", "message": message}}

    def _usage(self) -> ResponseUsage:
        g = self._generation
        return {
            "input_tokens": len(g.prompt_ids),
            "input_tokens_details": {"cached_tokens": g.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": len(g.output_ids),
            "output_tokens_details": {"reasoning_tokens": self._parsers.count_reasoning(g.output_ids)},
            "total_tokens": len(g.prompt_ids) + len(g.output_ids),
        }


class _Stream:
    """Numbered events of one response."""

    def __init__(self, response_id: str) -> None:
        self._response_id = response_id
        self._number = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        data = encode_json({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def events(self, change: Change, part: Part, text: str) -> Iterator[bytes]:
        place = {"item_id": _id(self._response_id, part), "output_index": part.index}
        if part.kind != "call":
            place["content_index"] = 0
        if change == "begin":
            item = _item(self._response_id, part, status="in_progress")
            yield self.event("response.output_item.added", output_index=part.index, item=item)
            if part.kind != "call":
                yield self.event("response.content_part.added", **place, part=_content(part))
        elif change == "add":
            if part.kind == "call":
                yield self.event("response.function_call_arguments.delta", **place, delta=text)
            else:
                logprobs: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
                yield self.event(f"response.{TEXT_EVENTS[part.kind]}.delta", **place, delta=text, **logprobs)
        else:
            if part.kind == "call":
                arguments = {"name": part.name, "arguments": part.text}
                yield self.event("response.function_call_arguments.done", **place, **arguments)
            else:
                logprobs = {"logprobs": []} if part.kind == "text" else {}
                yield self.event(f"response.{TEXT_EVENTS[part.kind]}.done", **place, text=part.text, **logprobs)
                yield self.event("response.content_part.done", **place, part=_content(part))
            item = _item(self._response_id, part)
            yield self.event("response.output_item.done", output_index=part.index, item=item)


def _id(response_id: str, part: Part) -> str:
    return f"{PREFIXES[part.kind]}_{response_id.removeprefix('resp_')}_{part.index}"


def _content(part: Part) -> OutputContent:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


def _item(response_id: str, part: Part, status: Any = "completed") -> OutputItem:
    """The item of a part; in progress: its form at the start of a stream, without content."""
    content = [] if status == "in_progress" else [_content(part)]
    name = _id(response_id, part)
    if part.kind == "text":
        return {"type": "message", "id": name, "status": status, "role": "assistant", "content": content}
    if part.kind == "reasoning":
        return {"type": "reasoning", "id": name, "status": status, "summary": [], "content": content}
    return {
        "type": "function_call", "id": name, "status": status, "call_id": part.id, "name": part.name,
        "arguments": part.text,
    }  # fmt: skip
