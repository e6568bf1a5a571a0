"""A client of event streams with low CPU cost: `events`, and `answer` for whole answers.

A general HTTP client takes 100 to 200 us of processor time a chunk. On a machine shared with the server, this is more
than the server itself takes for a token. Here httptools parses the answer, and the time of an event is the arrival of
its bytes, not the run of the coroutine that reads it.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from moe_engine.errors import MoeEngineError

DONE = b"[DONE]"


class AnswerError(MoeEngineError):
    """The server answered with another status than 200, or the connection ended too early."""


async def events(url: str, body: Any, headers: Mapping[str, str] | None = None) -> AsyncIterator[tuple[float, bytes]]:
    """POSTs `body` as JSON; yields the data of each server-sent event, with the time of its arrival.

    Every request has a connection of its own. The stream ends at ``[DONE]``, or with the answer.

    Args:
        url: http or https.
        body: an object that msgspec can encode as JSON.
        headers: of the request, in addition to the necessary ones.
    Yields: seconds of `time.perf_counter`, and the bytes after ``data:``.
    Raises:
        AnswerError: another status than 200, with the start of the answer; a truncated answer.
        OSError: no connection.
    """
    transport, exchange = await _send(url, body, headers, as_events=True)
    try:
        while True:
            for moment, data in await exchange.take():
                if data == DONE:
                    return
                yield moment, data
            if exchange.ended:
                return
    finally:
        transport.close()


async def answer(url: str, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
    """POSTs `body` as JSON; returns the body of the answer. Errors: those of `events`."""
    transport, exchange = await _send(url, body, headers, as_events=False)
    try:
        while not exchange.ended:
            await exchange.take()
        await exchange.take()
        return exchange.content
    finally:
        transport.close()


async def _send(
    url: str, body: Any, headers: Mapping[str, str] | None, as_events: bool
) -> tuple[asyncio.BaseTransport, _Exchange]:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    request = _request(parts.netloc, f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}", body, headers)
    return await asyncio.get_running_loop().create_connection(
        lambda: _Exchange(request, as_events),
        parts.hostname or "",
        parts.port or (443 if secure else 80),
        ssl=ssl.create_default_context() if secure else None,
    )


def _request(host: str, target: str, body: Any, headers: Mapping[str, str] | None) -> bytes:
    content = msgspec.json.encode(body)
    lines = {
        "Host": host,
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        "Accept": "text/event-stream",
        "Connection": "close",
        **(headers or {}),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {target} HTTP/1.1\r\n{head}\r\n".encode() + content


class _Exchange(asyncio.Protocol):
    """A request and its answer.

    Attributes:
        ended: whether the answer is complete; events may be left to take.
        content: the answer so far; for an event stream, the incomplete line.
    """

    def __init__(self, request: bytes, as_events: bool) -> None:
        self._request, self._as_events = request, as_events
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._now = 0.0
        self.content = b""
        self._events: list[tuple[float, bytes]] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.ended = False

    async def take(self) -> list[tuple[float, bytes]]:
        """All events that have arrived; waits for the first one or the end."""
        if not self._events and not self.ended and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        taken, self._events = self._events, []
        if not taken and self._error is not None:
            raise self._error
        return taken

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(AnswerError(f"not an HTTP answer: {error}"))
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended:
            self._fail(AnswerError(f"the answer broke off: {exc or 'the server closed the connection'}"))
        self._wake()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done() and (self._events or self.ended or self._error is not None):
            waiter.set_result(None)

    # -- httptools

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.content += body
        if self._as_events and self._status == 200:
            *lines, self.content = self.content.split(b"\n")
            self._events += [(self._now, line[5:].strip()) for line in lines if line.startswith(b"data:")]

    def on_message_complete(self) -> None:
        self.ended = True
        if self._status != 200:
            self._fail(AnswerError(f"HTTP {self._status}: {self.content[:500].decode(errors='replace')}"))
