"""Requests in, answers and event streams out, and noticing at once when a client is gone."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from moe_engine.errors import InputError
from moe_engine.server.errors import ClientGoneError, Shape, error_response, problem_of, stream_error
from moe_engine.unicode_checks import check_unicode_within

T = TypeVar("T")

encode_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
LENIENT_BYTES = 2**20


def json_response(value: Any, status: int = 200) -> Response:
    return Response(encode_json(value), status, media_type="application/json")


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request.

    Raises:
        InputError: 413 as soon as it is known to be longer than `limit` bytes.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
    except ClientDisconnect:
        raise ClientGoneError from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def read_object(request: Request, limit: int) -> dict[str, Any]:
    """The JSON object a client sent.

    Raises:
        InputError: not JSON, not an object, or compressed.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise InputError(f"Content-Encoding {encoding!r:.40}: send the body uncompressed", status=415)
    body = await read_body(request, limit)
    if not body.strip():
        raise InputError("the request body is empty; send a JSON object")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        value = _decode_leniently(body, exc)
    if not isinstance(value, dict):
        raise InputError(f"the request body must be a JSON object, not {_json_kind(value)}")
    return value


def _decode_leniently(body: bytes, cause: Exception) -> Any:
    """Python clients send NaN and Infinity; decoding them lets the check of the field name it. What Python's decoder
    lets through besides, half surrogate pairs, is refused here: all strings of a request can be encoded. Large bodies
    are not read twice, for all requests would wait meanwhile."""
    try:
        if len(body) > LENIENT_BYTES:
            raise ValueError
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise InputError(f"the request body is not valid JSON: {cause}") from None
    check_unicode_within(value)
    return value


def _json_kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _too_large(limit: int) -> InputError:
    return InputError(f"the request body is larger than this server accepts ({limit} bytes)", status=413)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up.

    Raises:
        ClientGoneError: the client hung up.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """A stream of server-sent events, closed with `data: [DONE]`.

    The status line waits for the first event, so that a request the engine refuses gets a proper HTTP error. When the
    client hangs up, the generator is closed at once, wherever it stands.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], shape: Shape) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pump.cancel()
            gone.cancel()
            await asyncio.gather(pump, gone, return_exceptions=True)

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                first = await anext(events, b"")
            except Exception as exc:
                await error_response(problem_of(exc), self._shape)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as exc:
                await send({"type": "http.response.body", "body": stream_error(exc), "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})


def plain_floats(value: Any) -> Any:
    """Replaces numbers JSON cannot hold by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): plain_floats(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain_floats(v) for v in value]
    return value if isinstance(value, (str, int, bool)) or value is None else str(value)
