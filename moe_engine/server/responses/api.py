"""/v1/responses: OpenAI's newer form of chat, over the chat endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moe_engine.errors import InputError, TooLongError
from moe_engine.frontend.encoding import check_kind
from moe_engine.frontend.frontend import Job
from moe_engine.frontend.generation import Generation
from moe_engine.server.bodies import PROCESS_BYTES, Plan
from moe_engine.server.errors import openai_body, problem_of
from moe_engine.server.event_stream import EventStream
from moe_engine.server.field_names import named
from moe_engine.server.http_io import cancel_on_disconnect, decode_body, encode_json, json_response, read_query
from moe_engine.server.openai.chat import ChatApi
from moe_engine.server.responses.answer import Answer
from moe_engine.server.responses.events import ResponseEvents
from moe_engine.server.responses.items import input_items, page_of
from moe_engine.server.responses.prompt import (
    NAMES,
    chat_request,
    check_options,
    end_from,
    input_messages,
    repeated_fields,
    shortened,
    shorter_starts,
)
from moe_engine.server.responses.store import ResponseStore, Running
from moe_engine.server.responses.types import (
    DeletedResponse,
    InputItemsQuery,
    InputTokens,
    ResponseObject,
    ResponsesPlan,
    ResponsesRequest,
    RetrieveQuery,
)
from moe_engine.server.state import ServerState
from moe_engine.validation import refuse_unavailable


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
        with named(NAMES):
            plan, job = await cancel_on_disconnect(request, self._begin_fitting(plan))
        asked, model, parsers = plan.options
        answer = Answer(job.generations[0], asked, model, parsers)
        if asked.stream:
            return EventStream(self._state.frontend, job, ResponseEvents(answer, self._keep), openai_body)
        if asked.background:
            self._begin(answer, job)
            return json_response(answer.begun())
        await cancel_on_disconnect(request, self._state.frontend.collect(job))
        response = answer.whole()
        self._keep(answer, response)
        return json_response(response)

    def read(self, body: bytes | bytearray) -> Plan:
        """`Plan.options`: `ResponsesPlan`, the model's name, `ParserOptions`."""
        check_kind(self._state.client.info, pooled=False)
        req = decode_body(body, ResponsesRequest)
        refuse_unavailable(req)
        check_options(req)
        before = self._previous(req)
        messages = input_messages(req.input, input_messages(before, field="previous_response_id"))
        stores = req.store is not False
        asked = ResponsesPlan(
            bool(req.stream), bool(req.background), stores, repeated_fields(req), before if stores else [],
            req.input if stores else [],
        )  # fmt: skip
        with named(NAMES):
            if req.truncation == "auto":
                return shortened(messages, lambda some: self._plan(req, some, asked))
            return self._plan(req, messages, asked)

    def _plan(self, req: ResponsesRequest, messages: list[dict[str, Any]], asked: ResponsesPlan) -> Plan:
        plan = self._chat.plan(*chat_request(req, messages))
        _, model, parsers = plan.options
        has_images = any(prompt.sources for prompt in plan.read.prompts)
        asked.cut = (req, messages) if has_images and req.truncation == "auto" else None
        return Plan(plan.read, (asked, model, parsers))

    async def _begin_fitting(self, plan: Plan) -> tuple[Plan, Job]:
        """Begins a request. The tokens of images are known only now: `truncation: auto` drops further turns if the
        prompt is too long with them."""
        while True:
            try:
                return plan, await self._state.frontend.begin(plan.read, self._state.token_json.chat)
            except TooLongError:
                asked: ResponsesPlan = plan.options[0]
                if asked.cut is None or not (starts := shorter_starts(asked.cut[1])):
                    raise
                req, messages = asked.cut
                plan = await asyncio.to_thread(self._plan, req, end_from(messages, starts[0]), asked)

    async def input_tokens(self, request: Request) -> Response:
        """Tokens of the prompt of a response."""
        return await self._state.bodies.answer(request, "responses_input_tokens")

    def counted(self, body: bytes | bytearray) -> Iterator[bytes]:
        req = decode_body(body, ResponsesRequest)
        refuse_unavailable(req)
        with named(NAMES):
            messages = input_messages(req.input, input_messages(self._previous(req), field="previous_response_id"))
            count = self._chat.num_tokens(*chat_request(req, messages))
        answer: InputTokens = {"object": "response.input_tokens", "input_tokens": count}
        yield encode_json(answer)

    def _previous(self, req: ResponsesRequest) -> list[dict[str, Any]]:
        """The items of the conversation that a request continues."""
        if req.previous_response_id is None:
            return []
        if self._store is None:
            words = f"bodies above {PROCESS_BYTES} bytes cannot continue a stored response; send the whole conversation"
            raise InputError.at("previous_response_id", f"{words} as input")
        return self._store.conversation(req.previous_response_id)

    def _keep(self, answer: Answer, response: ResponseObject) -> None:
        asked = answer.asked
        if asked.store and self._store is not None and (asked.background or response["status"] != "failed"):
            self._store.put(response, [*asked.before, *input_items(asked.input, answer.id)])

    def _begin(self, answer: Answer, job: Job) -> None:
        """Runs a job in the background. Its response is stored at its end, however it ends."""
        store = self._store
        assert store is not None
        store.check_begin(answer.id)
        task = asyncio.create_task(self._state.frontend.collect(job))
        store.begin(answer.id, Running(answer.begun, task))

        def end(task: asyncio.Task[list[Generation]]) -> None:
            store.ended(answer.id)
            if task.cancelled():
                response = answer.response("cancelled", [])
            elif (error := task.exception()) is not None:
                response = answer.failed(problem_of(error).message)
            else:
                response = answer.whole()
            self._keep(answer, response)

        task.add_done_callback(end)

    # -- stored responses

    async def retrieve(self, request: Request) -> Response:
        """A stored response, or the state of one in the background."""
        assert self._store is not None
        if read_query(request, RetrieveQuery).stream:
            raise InputError.at("stream", "a stored response is not streamed; request it until its status is completed")
        return Response(self._store.response(request.path_params["response_id"]), media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Deletes a stored response; one in the background is cancelled first."""
        assert self._store is not None
        name = request.path_params["response_id"]
        await self._store.delete(name)
        answer: DeletedResponse = {"id": name, "object": "response.deleted", "deleted": True}
        return json_response(answer)

    async def cancel(self, request: Request) -> Response:
        """Cancels a response in the background."""
        assert self._store is not None
        return Response(await self._store.cancel(request.path_params["response_id"]), media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        """The items that a stored response was made from: its input, after the conversation that it continues."""
        assert self._store is not None
        query = read_query(request, InputItemsQuery)
        return json_response(page_of(self._store.items(request.path_params["response_id"]), query))
