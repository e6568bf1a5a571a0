"""uvicorn's HTTP/1.1 connection, plus support for bodies of requests with ``Upgrade``, streams for clients of HTTP/1.0,
and limits on request headers and connections.

Clients such as Java's HttpClient and ``curl --http2`` send ``Upgrade: h2c`` with the first request of every plain
connection. A server that does not upgrade must respond in HTTP/1.1 as if the header were absent (RFC 9110, 7.8);
httptools, however, stops parsing after such headers and leaves the body to the new protocol. uvicorn's other parser,
h11, parses it, but takes several times as long for each chunk of a stream.

uvicorn has no public hook for either, and no header limits with httptools. This class extends a private one: `PRIVATE`
lists the attributes used, pyproject.toml bounds uvicorn's version, and a test compares them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any
from weakref import WeakKeyDictionary, ref

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from moe_engine.errors import InputError
from moe_engine.processes import open_files
from moe_engine.server.chunk_sizes import ChunkSizes
from moe_engine.server.errors import EXCHANGE, error_format_of, error_response, problem_of
from moe_engine.server.start_queue import StartQueue

MAX_HEAD_BYTES = 2**16
HEAD_SECONDS = 60.0
"""Time limit for a complete request head, from the connection or from the head's first byte."""
UNREAD_SECONDS = 120.0
"""A connection whose client reads nothing of its response for this long is closed: a drain, a weight update and the
unloading of an adapter wait for running requests."""

PRIVATE = frozenset(
    {
        "_start_asgi_task",
        "_unset_keepalive_if_required",
        "connections",
        "cycle",
        "flow",
        "headers",
        "logger",
        "loop",
        "parser",
        "pipeline",
        "scope",
        "url",
    }
    | {"transport", "on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body", "on_message_complete"}
)
"""Attributes of `HttpToolsProtocol` used by `Connection` beyond `asyncio.Protocol`."""
CYCLE = frozenset(
    {"body", "chunked_encoding", "disconnected", "flow", "more_body", "response_complete", "response_started"}
    | {"expected_content_length", "message_event", "transport", "waiting_for_100_continue"}
)
"""Attributes of its `cycle` used here; of its `flow`: `write_paused`, `resume_reading`."""

HTTP2 = "HTTP/2 is not available; set the client or the proxy to HTTP/1.1"
TLS = "a TLS handshake on a port without TLS: use http://, or start the server with --ssl-certfile and --ssl-keyfile"
TLS_HANDSHAKE = b"\x16\x03"
"""The first bytes of a TLS connection (RFC 8446, 5.1)."""
HALF_CLOSED = (
    "The client closed its side of the connection before the response: keep it open until the response has come."
)
HEAD_END = b"\r\n\r\n"
_FRAMING = (b"content-length", b"transfer-encoding")


_QUEUES: WeakKeyDictionary[asyncio.AbstractEventLoop, StartQueue] = WeakKeyDictionary()
"""The start queue of each loop with connections."""


class Exchange:
    """One request of a connection and its response, without ASGI's coroutines and tasks.

    Parts of the response may be written outside the request's task, which sends head and end: by a `PartWriter`.

    Its references are weak: it is part of the scope, which they refer to, and connections are freed without the
    garbage collector.
    """

    __slots__ = ("_chunks", "_connection", "_cycle")

    def __init__(self, connection: Connection, chunks: ChunkSizes | None) -> None:
        self._chunks = chunks
        self._connection = ref(connection)
        self._cycle: Callable[[], Any] = ref(connection.cycle)

    def whole_body(self) -> bytes | None:
        """The request's body if all of it has arrived and none was read. Once: it counts as read."""
        cycle = self._cycle()
        if cycle is None or cycle.more_body or cycle.waiting_for_100_continue or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    @property
    def has_unread_body(self) -> bool:
        """Whether more of the request's body will arrive."""
        cycle = self._cycle()
        return cycle is not None and cycle.more_body and not cycle.disconnected

    @property
    def declared_bytes(self) -> int:
        """Size of the body that its chunk headers have declared so far; 0 if it is not chunked."""
        return 0 if self._chunks is None else self._chunks.declared

    def writer(self) -> PartWriter | None:
        """A writer of the response's parts; None if the connection is lost."""
        cycle = self._cycle()
        return None if cycle is None else PartWriter(cycle)

    @property
    def is_lost(self) -> bool:
        """Whether the client has disconnected."""
        connection = self._connection()
        return connection is None or connection.when_lost is None

    @contextmanager
    def when_lost(self, callback: Callable[[], object]) -> Iterator[None]:
        """Calls `callback` if the client disconnects while the block runs."""
        connection = self._connection()
        assert connection is not None and connection.when_lost is not None
        if not connection.pipeline and not connection.transport.is_closing():
            # uvicorn pauses after a large body, and the end of a paused connection is not noticed
            connection.flow.resume_reading()
        waiting = connection.when_lost
        waiting.add(callback)
        try:
            yield
        finally:
            waiting.discard(callback)


class PartWriter:
    """Writes parts of one response. For the request's task and what it owns, which end with the response: the
    references are strong, because a stream passes here for every token.
    """

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: Any) -> None:
        self._cycle, self._flow, self._write = cycle, cycle.flow, cycle.transport.write

    def is_open(self) -> bool:
        """Whether a part may be written: false before head and after the end, and while the client reads too
        slowly."""
        cycle = self._cycle
        return (
            cycle.response_started
            and not self._flow.write_paused
            and not cycle.response_complete
            and not cycle.disconnected
        )

    def write(self, data: bytes) -> None:
        """Sends a part that is not empty. Call only while `is_open`."""
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._cycle.chunked_encoding else data)

    def write_three(self, before: bytes, data: bytes, after: bytes) -> None:
        """`write` of all three as one part."""
        if self._cycle.chunked_encoding:
            size = len(before) + len(data) + len(after)
            self._write(b"%x\r\n%b%b%b\r\n" % (size, before, data, after))
        else:
            self._write(b"%b%b%b" % (before, data, after))


class _AnyLength(int):
    """Unknown rest of the length of a response. uvicorn compares it with the length of each part and, at the end, 0."""

    def __sub__(self, other: int) -> _AnyLength:
        return self

    def __lt__(self, other: int) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False


class Connection(HttpToolsProtocol):
    """Ignores ``Upgrade``: the data after such a head is parsed as its body. Refuses oversized or slow heads. Starts no
    request whose client has left."""

    url = b""
    """Path and query of the request whose head is read."""
    _head_bytes: int | None = 0
    """Bytes of an incomplete head; None during a body or a response."""
    _head_timer: asyncio.TimerHandle | None = None
    when_lost: set[Callable[[], object]] | None = None
    """Called when the connection is lost; None from then on."""
    _unread_timer: asyncio.TimerHandle | None = None
    """Runs while the client reads too slowly."""
    _chunks: ChunkSizes | None = None
    """Chunk sizes of the body that is received, if it is chunked."""
    _tail = b""
    """The last bytes received, which may be the beginning of `HEAD_END`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.when_lost = set()
        if len(self.connections) > (most := max(0, open_files.limit() - open_files.RESERVED)):
            self._refuse(503, f"The server has {most} connections, the most for its limit of open files (ulimit -n).")
            return
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_ended()
        self._unread_ended()
        super().connection_lost(exc)
        waiting, self.when_lost = self.when_lost or set(), None
        for callback in tuple(waiting):
            callback()

    def eof_received(self) -> None:
        """Ends the connection and its requests. A client that closed only its sending side reads why."""
        self._answer_waiting(InputError(HALF_CLOSED, status=400))

    def end(self, error: Exception) -> None:
        """Closes the connection without the rest of its responses: its requests end as if the client had left. A client
        that waits for a response gets the error instead."""
        if self._answer_waiting(error):
            self.transport.close()
        else:
            self.transport.abort()

    def _answer_waiting(self, error: Exception) -> bool:
        """Sends the error to a client that waits for a response, or has sent a part of a head. False: there is none."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            waits = bool(self._head_bytes)
        else:
            waits = not cycle.response_started and not self.pipeline
        if waits and not self.transport.is_closing():
            self._send_error(error)
            if cycle is not None:
                cycle.disconnected = True  # its task sends nothing behind the error
            return True
        return False

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._unread_ended()
        super().resume_writing()

    def _await_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self._check_reader, unread)

    def _check_reader(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._await_reader()
        else:
            self.logger.warning("A client read nothing of its response for %g s: disconnected", UNREAD_SECONDS)
            self.transport.abort()

    def _unread_ended(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if cycle.scope["method"] == "GET":  # needs no turn of its own: a probe must not wait for a burst of prompts
            super()._start_asgi_task(cycle, app)
            return
        queue = _QUEUES.get(self.loop)
        if queue is None:
            queue = _QUEUES[self.loop] = StartQueue()
        queue.add(partial(self._start_unless_lost, super()._start_asgi_task, cycle, app))

    def _start_unless_lost(self, start: Callable[[Any, Any], None], cycle: Any, app: Any) -> None:
        if not cycle.disconnected:
            start(cycle, app)

    def on_headers_complete(self) -> None:
        self._head_ended()
        if self.url.startswith(b"//"):  # a client's base URL ended with a slash; else the first part would be a host
            self.url = b"/" + self.url.lstrip(b"/")
        super().on_headers_complete()
        scope: Any = self.scope
        if scope["http_version"] == "1.0":  # such a client supports no chunks: the end of the connection ends the body
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _AnyLength()
        chunked = any(name == b"transfer-encoding" and b"chunked" in value.lower() for name, value in self.headers)
        self._chunks = ChunkSizes() if chunked else None
        scope[EXCHANGE] = Exchange(self, self._chunks)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        at, size = 0, len(data)
        while at < size and not self.transport.is_closing():
            end = self._end_of_part(data, at)
            self._take(data[at:end])
            at = end
        if self._head_bytes is None or self.transport.is_closing():
            return
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"The request's headers are larger than this server accepts ({MAX_HEAD_BYTES} bytes).")
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _end_of_part(self, data: bytes, at: int) -> int:
        """The end of the next part to parse: heads end parts, so that it is known where a chunked body begins."""
        if self.cycle is not None and self.cycle.more_body:
            return len(data)
        begun = (self._tail + data[at : at + len(HEAD_END) - 1]).find(HEAD_END)
        if begun >= 0:
            return at + begun + len(HEAD_END) - len(self._tail)
        found = data.find(HEAD_END, at)
        return len(data) if found < 0 else found + len(HEAD_END)

    def _take(self, part: bytes) -> None:
        before = self._chunks
        self._parse(part)
        chunks, end = self._chunks, self._tail + part[-len(HEAD_END) :]
        self._tail = end[1 - len(HEAD_END) :]
        if chunks is None or not self.cycle.more_body or self.transport.is_closing():
            return
        if chunks is before:
            declared = chunks.declared
            chunks.feed(part)
            if chunks.declared != declared:
                self.cycle.message_event.set()  # a reader may refuse the body now
        elif not end.endswith(HEAD_END):  # its body has begun somewhere in this part
            chunks.has_ended = True

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                self.cycle.more_body = True  # undoes httptools' on_message_complete
                self.parser = httptools.HttpRequestParser(_Rest(self))
                self.parser.feed_data(_head_again(self.headers))
            except httptools.HttpParserError as exc:
                problem = str(exc.__context__ or exc)
                if data.startswith(TLS_HANDSHAKE):
                    problem = TLS
                message = HTTP2 if "PRI" in problem else f"Invalid HTTP request: {problem}"
                self.logger.warning("%s", message)
                self._refuse(400, message)
                return

    def _head_ended(self) -> None:
        self._head_bytes = None
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self._head_bytes:
            self._refuse(408, f"The request's headers were not complete within {HEAD_SECONDS:g} s.")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Sends an error in the format of the request's path, if that was read, and closes the connection. While an
        earlier request or a response is under way it only closes: the error would look like a part of that response."""
        cycle = self.cycle
        reads_body = cycle is not None and cycle.more_body and not cycle.response_started and not self.pipeline
        if cycle is None or cycle.response_complete or reads_body:
            self._send_error(InputError(message, status=status))
        self.transport.close()

    def _send_error(self, error: Exception) -> None:
        path = self.url.partition(b"?")[0].decode("latin-1")
        response = error_response(problem_of(error), error_format_of(path))
        response.headers["connection"] = "close"
        head = b"".join([b"%b: %b\r\n" % header for header in response.raw_headers])
        phrase = HTTPStatus(response.status_code).phrase.encode()
        self.transport.write(b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (response.status_code, phrase, head, bytes(response.body)))


def _head_again(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Returns a head with the same body framing and without ``Upgrade``."""
    lines = [b"POST / HTTP/1.1", *(name + b": " + value for name, value in headers if name in _FRAMING)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


class _Rest:
    """Callbacks for a head that the connection has already seen: skips that head, forwards everything after it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._seen = False
        self.on_body = connection.on_body

    def on_message_begin(self) -> None:
        if self._seen:
            self._connection.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._seen:
            self._connection.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._seen:
            self._connection.on_header(name, value)

    def on_headers_complete(self) -> Any:
        if self._seen:
            self._connection.on_headers_complete()
        self._seen = True

    def on_message_complete(self) -> None:
        self._connection.on_message_complete()
