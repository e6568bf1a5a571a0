"""SGLang's own generation endpoints: /generate, /abort_request, /tokenize, /detokenize, /flush_cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response

from moe_engine.errors import InputError
from moe_engine.frontend.frontend import Job
from moe_engine.frontend.generate_input import GenerateInput, check_token_ids, refuse_unsupported_fields
from moe_engine.server.bodies import Plan
from moe_engine.server.errors import native_body
from moe_engine.server.http_io import EventStream, cancel_on_disconnect, encode_json, json_response, read_object, sse
from moe_engine.server.openai_messages import render_prompt
from moe_engine.server.state import ServerState

_FIELDS = (
    "text", "input_ids", "sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num",
    "token_ids_logprob", "priority", "extra_key",
    "routed_dp_rank",
)  # fmt: skip
FLUSH_POLL_SECONDS = 0.1
MAX_FLUSH_SECONDS = 3600


def boolean(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{name}: expected true or false, got {value!r:.80}", field=name)
    return bool(value)


def _flush_timeout(request: Request) -> float:
    given = request.query_params.get("timeout", "0")
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_FLUSH_SECONDS:
        raise InputError(f"timeout: expected seconds from 0 to {MAX_FLUSH_SECONDS}, got {given!r:.40}", field="timeout")
    return seconds


class NativeApi:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def generate(self, request: Request) -> Response:
        plan = await self._state.bodies.plan(request, "generate")
        job = await self._state.frontend.begin(plan.read, self._state.token_json.native)
        if job.stream:
            return EventStream(self._events(job), native_body)
        await cancel_on_disconnect(request, self._state.frontend.collect(job))
        outputs = [generation.output() for generation in job.generations]
        return json_response(outputs if job.is_list else outputs[0])

    def read_generate(self, body: dict[str, Any]) -> Plan:
        refuse_unsupported_fields(body)
        if body.get("routed_dp_rank") is None:  # the older name is data_parallel_rank
            body["routed_dp_rank"] = body.get("data_parallel_rank")
        inp = GenerateInput(**{name: body[name] for name in _FIELDS if body.get(name) is not None})
        inp.stream = boolean(body, "stream")
        inp.return_text_in_logprobs = boolean(body, "return_text_in_logprobs")
        inp.log_metrics = body.get("log_metrics") is None or boolean(body, "log_metrics")
        return Plan(self._state.frontend.read(inp))

    async def _events(self, job: Job) -> AsyncGenerator[bytes]:
        async with aclosing(self._state.frontend.chunks(job)) as chunks:
            async for chunk in chunks:
                yield sse(chunk)

    async def abort_request(self, request: Request) -> Response:
        body = await read_object(request)
        rid, everything = body.get("rid"), boolean(body, "abort_all")
        if not everything and (not isinstance(rid, str) or not rid):
            raise InputError("rid: give the id of the request to abort, or abort_all: true", field="rid")
        self._state.frontend.abort("" if everything else rid or "", all=everything, reason="Abort in /abort_request")
        return Response(status_code=200)

    async def flush_cache(self, request: Request) -> Response:
        """Clears the prefix cache; with `timeout` (query, seconds) waits for the server to become idle."""
        if await cancel_on_disconnect(request, self._flush(time.monotonic() + _flush_timeout(request))):
            return Response(
                "Cache flushed.\nPlease check backend logs for more details. "
                "(When there are running or waiting requests, the operation will not be performed.)\n",
                media_type="text/plain",
            )
        health = self._state.client.health()
        raise InputError(
            f"Cache not flushed: {health.num_running} requests are running and {health.num_waiting} waiting. Try again "
            "when the server is idle."
        )

    async def _flush(self, deadline: float) -> bool:
        while not (flushed := all(await self._state.client.call("flush_cache"))) and time.monotonic() < deadline:
            await asyncio.sleep(FLUSH_POLL_SECONDS)
        return flushed

    async def tokenize(self, request: Request) -> Response:
        return await self._state.bodies.answer(request, "tokenize")

    def tokenized(self, body: dict[str, Any]) -> Iterator[bytes]:
        tokenizer = self._state.tokenizer()
        prompt, messages = body.get("prompt"), body.get("messages")
        add_special = body.get("add_special_tokens", True)
        if not isinstance(add_special, bool):
            raise InputError("add_special_tokens: expected true or false", field="add_special_tokens")
        if (prompt is None) == (messages is None):
            raise InputError("prompt: give exactly one of prompt and messages", field="prompt")
        texts: list[Any] = prompt if isinstance(prompt, list) else [prompt]
        if messages is not None:
            texts, add_special = [render_prompt(self._state, messages, body)], False
        if not texts or not all(isinstance(text, str) for text in texts):
            raise InputError("prompt: expected a string or a list of strings", field="prompt")
        many, counts, last = isinstance(prompt, list), list[int](), -1
        yield b'{"tokens":' + (b"[" if many else b"")
        for index, ids in tokenizer.encode_parts(texts, add_special):
            if index != last:
                yield b"[" if last < 0 else b"],["
                counts.append(0)
                last = index
            if ids:
                yield (b"," if counts[-1] else b"") + encode_json(ids)[1:-1]
                counts[-1] += len(ids)
        rest = {"count": counts if many else counts[0], "max_model_len": self._state.client.info.context_len}
        yield (b"]]," if many else b"],") + encode_json(rest)[1:]

    async def detokenize(self, request: Request) -> Response:
        return await self._state.bodies.answer(request, "detokenize")

    def detokenized(self, body: dict[str, Any]) -> Iterator[bytes]:
        tokenizer = self._state.tokenizer()
        tokens = body.get("tokens")
        if not isinstance(tokens, list):
            raise InputError("tokens: expected a list of token ids", field="tokens")
        many = bool(tokens) and all(isinstance(ids, list) for ids in tokens)
        batch: list[list[int]] = tokens if many else [tokens]
        for ids in batch:
            check_token_ids(ids or [0], self._state.client.info.vocab_size, "tokens")
        skip = body.get("skip_special_tokens") is None or boolean(body, "skip_special_tokens")
        texts = [tokenizer.decode(ids, skip) for ids in batch]
        yield encode_json({"text": texts if many else texts[0]})
