"""SGLang's own generation endpoints: /generate, /abort_request, /tokenize, /detokenize, /flush_cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from moe_engine.errors import InputError
from moe_engine.frontend.chunks import Chunks
from moe_engine.frontend.generate_input import GenerateInput, GenerateRequest
from moe_engine.frontend.generation import Piece
from moe_engine.frontend.prompts import check_token_ids
from moe_engine.server.bodies import Plan
from moe_engine.server.errors import openai_body
from moe_engine.server.event_stream import DONE, DataEvents, EventStream, sse
from moe_engine.server.http_io import (
    cancel_on_disconnect,
    decode_body,
    decode_body_and_rest,
    encode_json,
    json_response,
    read_query,
    read_small,
)
from moe_engine.server.native_types import AbortRequest, DetokenizeRequest, FlushQuery, Texts, TokenizeRequest
from moe_engine.server.openai.images import take_images
from moe_engine.server.openai.messages import render_prompt
from moe_engine.server.state import ServerState
from moe_engine.tokenizer.chat_template import ChatTemplate
from moe_engine.validation import refuse_unavailable

FLUSH_POLL_SECONDS = 0.1


class _Events(DataEvents):
    def __init__(self, chunk_of: Chunks) -> None:
        super().__init__(openai_body)
        self._chunk_of = chunk_of

    def of(self, piece: Piece) -> bytes:
        return sse(self._chunk_of(piece))

    def end(self) -> bytes:
        return DONE


class NativeApi:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def generate(self, request: Request) -> Response:
        """Generation, SGLang's format."""
        plan = await self._state.bodies.plan(request, "generate")
        begun = self._state.frontend.begin(plan.read, self._state.token_json.native)
        job = await cancel_on_disconnect(request, begun)
        if job.stream:
            events = _Events(Chunks(job, self._state.frontend.settings.incremental_streaming_output))
            return EventStream(self._state.frontend, job, events, openai_body)
        await cancel_on_disconnect(request, self._state.frontend.collect(job))
        outputs = [generation.output() for generation in job.generations]
        return json_response(outputs if job.is_list else outputs[0])

    def read_generate(self, body: bytes | bytearray) -> Plan:
        request = decode_body(body, GenerateRequest)
        refuse_unavailable(request)
        return Plan(self._state.frontend.read(GenerateInput(**asdict(request))))

    async def abort_request(self, request: Request) -> Response:
        """Aborts requests."""
        asked = await read_small(request, AbortRequest)
        if not asked.abort_all and not asked.rid:
            raise InputError.at("rid", "give the id of the request to abort, or abort_all: true")
        rid = "" if asked.abort_all else asked.rid or ""
        self._state.frontend.abort(rid, all=bool(asked.abort_all), reason="Abort in /abort_request")
        return Response(status_code=200)

    async def flush_cache(self, request: Request) -> Response:
        """Clears the prefix cache."""
        seconds = read_query(request, FlushQuery).timeout
        if await cancel_on_disconnect(request, self._flush(time.monotonic() + seconds)):
            return PlainTextResponse(
                "Cache flushed.\nPlease check backend logs for more details. "
                "(When there are running or waiting requests, the operation will not be performed.)\n"
            )
        health = self._state.client.health()
        raise InputError(
            f"Cache not flushed: requests had not ended (now {health.num_running} run and {health.num_waiting} wait). "
            "/flush_cache?timeout=SECONDS waits for their end."
        )

    async def _flush(self, deadline: float) -> bool:
        while not (flushed := all(await self._state.client.call("flush_cache"))) and time.monotonic() < deadline:
            await asyncio.sleep(FLUSH_POLL_SECONDS)
        return flushed

    async def tokenize(self, request: Request) -> Response:
        """Token ids of texts or of a conversation."""
        return await self._state.bodies.answer(request, "tokenize")

    def tokenized(self, body: bytes | bytearray) -> Iterator[bytes]:
        """The JSON of `native_types.Tokens`, in pieces."""
        asked, whole = decode_body_and_rest(body, TokenizeRequest)
        tokenizer = self._state.tokenizer()
        add_special = asked.add_special_tokens is not False
        if (asked.prompt is None) == (asked.messages is None):
            raise InputError.at("prompt", "give exactly one of prompt and messages")
        many, counts, strings = isinstance(asked.prompt, list), list[int](), list[list[str]]()
        texts = asked.prompt if isinstance(asked.prompt, list) else [asked.prompt or ""]
        if asked.messages is not None:
            messages, _ = take_images(self._state, whole["messages"])
            texts, add_special = [render_prompt(self._state, messages, asked, whole.get("tools"))], False
        yield b'{"tokens":' + (b"[" if many else b"")
        for index, ids in tokenizer.encode_parts(texts, add_special):
            if index == len(counts):
                yield b"],[" if counts else b"["
                counts.append(0)
                strings.append([])
            if ids:
                yield (b"," if counts[-1] else b"") + encode_json(ids)[1:-1]
                counts[-1] += len(ids)
                if asked.return_token_strs:
                    strings[-1] += map(tokenizer.token_string, ids)
        rest: dict[str, Any] = {
            "count": counts if many else counts[0],
            "max_model_len": self._state.client.info.context_len,
        }
        if asked.return_token_strs:
            rest["token_strs"] = strings if many else strings[0]
        yield (b"]]," if many else b"],") + encode_json(rest)[1:]

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        return await self._state.bodies.answer(request, "detokenize")

    def detokenized(self, body: bytes | bytearray) -> Iterator[bytes]:
        asked = decode_body(body, DetokenizeRequest)
        tokenizer = self._state.tokenizer()
        tokens: list[Any] = asked.tokens
        many = bool(tokens) and all(isinstance(ids, list) for ids in tokens)
        batch = tokens if many else [tokens]
        for ids in batch:
            check_token_ids(ids or [0], self._state.client.info.vocab_size, "tokens")
        texts = [tokenizer.decode(ids, asked.skip_special_tokens is not False) for ids in batch]
        answer: Texts = {"text": texts} if many else {"text": texts[0], "prompt": texts[0]}
        yield encode_json(answer)

    async def tokenizer_info(self, request: Request) -> Response:
        """Special tokens and chat template, for clients that tokenize with /tokenize."""
        template = self._state.chat_template
        answer: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self._state.client.info.context_len,
            **self._state.tokenizer().special_tokens,
        }
        if isinstance(template, ChatTemplate):
            answer["chat_template"] = template.source
        return json_response(answer)
