"""HTTP I/O: request bodies, JSON responses, event streams (SSE), detection of client disconnects."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from contextlib import aclosing, suppress
from functools import cache
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moe_engine.errors import InputError
from moe_engine.server.errors import EXCHANGE, ClientDisconnectedError
from moe_engine.server.http_protocol import Exchange
from moe_engine.server.large_schemas import cut_schema
from moe_engine.server.unknown_fields import report_unknown
from moe_engine.validation import check_unicode_within, checked, prepared

T = TypeVar("T")

encode_json = msgspec.json.Encoder().encode
SMALL_BODY_BYTES = 2**16
NAMES_BODY_BYTES = 2**25
WEIGHTS_BODY_BYTES = 2**31
BODY_PAUSE_SECONDS = 60.0
"""A request whose body stalls for this long is refused with 408."""
SLOW_BODY_SECONDS, SLOW_BODY_BYTES = 300.0, 2**20
"""So is one whose body takes longer than this, and then brings fewer bytes than this in a second."""


def json_response(value: Any, status: int = 200) -> Response:
    return Response(encode_json(value), status, media_type="application/json")


class Body:
    """A request body, read as it arrives.

    Raises:
        InputError: 415 if compressed; 413 as soon as it exceeds `limit` bytes, or declares to.
    """

    def __init__(self, request: Request, limit: int) -> None:
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise InputError(f"Content-Encoding {encoding!r:.40}: send the body uncompressed", status=415)
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        self._limit = limit
        self._request = request
        self._exchange: Exchange | None = request.scope.get(EXCHANGE)
        self._size = 0
        self._has_ended = False
        self._began = time.monotonic()
        self.is_complete = False

    async def read(self, enough: int) -> bytes:
        """The whole body, or its beginning once it exceeds `enough` bytes. Raises like the class."""
        whole = None if self._exchange is None else self._exchange.whole_body()
        if whole is not None:
            self.is_complete = True
            if len(whole) > self._limit:
                raise _too_large(self._limit)
            return whole
        parts: list[bytes] = []
        while self._size <= enough and (part := await self._next()) is not None:
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def rest(self) -> AsyncGenerator[bytes]:
        """The rest of the body after `read`. Raises like the class."""
        while (part := await self._next()) is not None:
            if part:
                yield part

    async def _next(self) -> bytes | None:
        """The next part, which may be empty; None after the last one."""
        if self._has_ended:
            self.is_complete = True
            return None
        left = self._began + SLOW_BODY_SECONDS + self._size / SLOW_BODY_BYTES - time.monotonic()
        try:
            async with asyncio.timeout(min(left, BODY_PAUSE_SECONDS)):
                message = await self._request.receive()
        except TimeoutError:
            why = f"no data of the request body for {BODY_PAUSE_SECONDS:g} s"
            if left < BODY_PAUSE_SECONDS:
                why = f"the request body did not arrive within {SLOW_BODY_SECONDS:g} s"
            raise InputError(why, status=408) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        part: bytes = message.get("body", b"")
        self._size += len(part)
        self._has_ended = not message.get("more_body", False)
        declared = 0 if self._exchange is None else self._exchange.declared_bytes
        if max(self._size, declared) > self._limit:
            raise _too_large(self._limit)
        return part


async def read_small(request: Request, kind: type[T]) -> T:
    """Reads the body of an endpoint with a few short fields.

    Raises:
        InputError: invalid, compressed, or longer than `SMALL_BODY_BYTES`.
    """
    return decode_body(await Body(request, SMALL_BODY_BYTES).read(SMALL_BODY_BYTES), kind)


async def read_large(request: Request) -> bytes:
    """The body of an endpoint with lists of names. Raises InputError: compressed, or over `NAMES_BODY_BYTES`."""
    return await Body(request, NAMES_BODY_BYTES).read(NAMES_BODY_BYTES)


async def read_weights_body(request: Request, kind: type[T]) -> T:
    """Reads a body that holds weights, and decodes it in a thread.

    Raises:
        InputError: invalid, compressed, or longer than `WEIGHTS_BODY_BYTES`.
    """
    body = await Body(request, WEIGHTS_BODY_BYTES).read(WEIGHTS_BODY_BYTES)
    return await asyncio.get_running_loop().run_in_executor(None, decode_body, body, kind)


def read_query(request: Request, kind: type[T]) -> T:
    """The query's parameters. Raises InputError: names the parameter."""
    return checked(dict(request.query_params), kind, strict=False)


_REFUSALS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(prepared(kind))


def decode_body(body: bytes | bytearray, kind: type[T]) -> T:
    """Decodes and checks the JSON object in a body.

    Raises:
        InputError: not JSON, not an object, or not of the type; names the field.
    """
    rest, schema = cut_schema(body, kind)
    try:
        decoded: T = _decoder(kind).decode(rest)  # type: ignore[arg-type]  # types are hashable
    except _REFUSALS:
        value = _decode_leniently(body)
        decoded = checked(value, kind)
        report_unknown(body, kind, value)
        return decoded
    report_unknown(rest, kind)
    if schema is not None:
        schema.put_back(decoded)
    return decoded


def decode_body_and_rest(body: bytes | bytearray, kind: type[T]) -> tuple[T, dict[str, Any]]:
    """Like `decode_body`, with the whole object, whose parts may have fields that the type lacks."""
    rest, schema = cut_schema(body, kind)
    try:
        value = msgspec.json.decode(rest)
        decoded = msgspec.convert(value, prepared(kind), str_keys=True)
    except _REFUSALS:
        value = _decode_leniently(body)
        decoded, schema = checked(value, kind), None
    report_unknown(rest, kind, value)
    if schema is not None:
        schema.put_back(decoded)
    return decoded, value


def _decode_leniently(body: bytes | bytearray) -> dict[str, Any]:
    """Accepts NaN and Infinity, which Python clients send, so that the field's check can name the field. 2.0 becomes
    an integer, as in JSON Schema. Rejects lone surrogates: all strings of a request must be encodable."""
    if not body[:1024].strip() and not body.strip():
        raise InputError("the request body is empty; send a JSON object")
    try:
        value = json.loads(body, parse_float=_number)
    except RecursionError:
        raise InputError(
            "the request body is nested too deep; send fewer objects and lists within each other"
        ) from None
    except UnicodeDecodeError as exc:
        raise InputError(
            f"the request body is not UTF-8 at byte {exc.start}; send JSON in UTF-8, uncompressed"
        ) from None
    except json.JSONDecodeError as exc:
        raise InputError(f"the request body is not valid JSON: {exc}") from None
    except ValueError:
        most = sys.get_int_max_str_digits()
        raise InputError(f"the request body has a number of more than {most} digits; send shorter numbers") from None
    if not isinstance(value, dict):
        raise InputError(f"the request body must be a JSON object, not {_json_kind(value)}")
    check_unicode_within(value)
    return value


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _json_kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _too_large(limit: int) -> InputError:
    return InputError(f"the request body is larger than this server accepts ({limit} bytes)", status=413)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_on_disconnect(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects. Call after the body was read.

    Raises:
        ClientDisconnectedError: the client disconnected.
    """
    exchange: Exchange | None = request.scope.get(EXCHANGE)
    if exchange is not None:
        return await _cancel_when_lost(exchange, work)
    return await _cancel_on_message(request.receive, work)


async def _cancel_when_lost(exchange: Exchange, work: Awaitable[T]) -> T:
    """Cancels the current task; needs no task of its own."""
    if exchange.is_lost:
        if isinstance(work, Coroutine):
            work.close()  # never started
        raise ClientDisconnectedError
    task, lost = asyncio.current_task(), False
    assert task is not None

    def cancel() -> None:
        nonlocal lost
        lost = True
        task.cancel()

    try:
        with exchange.when_lost(cancel):
            return await work
    except asyncio.CancelledError:
        if lost and not task.uncancel():
            raise ClientDisconnectedError from None
        raise


async def _cancel_on_message(receive: Receive, work: Awaitable[T]) -> T:
    """The same by ASGI's disconnect message, for other servers."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


class StreamedResponse(Response):
    """Base of responses in parts, which `_pump` sends. If the client disconnects, it is cancelled immediately."""

    def __init__(self, headers: dict[str, str] | None = None) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # a failure is raised, which closes the connection: the response must not look complete
        with suppress(ClientDisconnectedError):
            await cancel_on_disconnect(Request(scope, receive), self._pump(scope, receive, send))

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class PartsResponse(StreamedResponse):
    """The parts of a generator, which is closed immediately if the client disconnects."""

    media_type = "application/json"

    def __init__(self, parts: AsyncGenerator[bytes]) -> None:
        super().__init__()
        self._parts = parts

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._parts) as parts:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def plain_floats(value: Any) -> Any:
    """Replaces numbers that JSON cannot represent by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): plain_floats(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain_floats(v) for v in value]
    return value if isinstance(value, (str, int, bool)) or value is None else str(value)
