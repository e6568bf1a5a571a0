"""Event streams (SSE): the events of a job's pieces, sent as the pieces arrive."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from starlette.types import Receive, Scope, Send

from moe_engine.frontend.frontend import Frontend, Job
from moe_engine.frontend.generation import Generation, Piece
from moe_engine.server.errors import EXCHANGE, ErrorFormat, error_response, problem_of, stream_error
from moe_engine.server.http_io import StreamedResponse, encode_json
from moe_engine.server.http_protocol import Exchange, PartWriter

DONE = b"data: [DONE]\n\n"


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


def named_event(name: str, /, **fields: Any) -> bytes:
    """A server-sent event with a name, which is also the `type` of its data."""
    return b"event: " + name.encode() + b"\ndata: " + encode_json({"type": name, **fields}) + b"\n\n"


class Events:
    """An endpoint's events of one job."""

    def of(self, piece: Piece) -> bytes:
        """The events of a piece; may be empty."""
        raise NotImplementedError

    def end(self) -> bytes:
        """The events after the last piece."""
        return b""

    def failed(self, error: Exception) -> bytes:
        """The events that end a stream after an error. Only called if an event was sent before."""
        raise NotImplementedError

    def around_text(self, generation: Generation) -> tuple[bytes, bytes] | None:
        """What is before and after the JSON of a plain piece's text, if the event is the same for all such pieces
        after the first piece, and none for a piece without text; else None."""
        return None


class EventStream(StreamedResponse):
    """A stream of server-sent events.

    The status line waits for the first event, so that a request the engine refuses gets a proper HTTP error. Later
    pieces are written in the task that receives the engine's steps, while the connection accepts them.
    """

    media_type = "text/event-stream"

    def __init__(self, frontend: Frontend, job: Job, events: Events, shape: ErrorFormat) -> None:
        super().__init__({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._frontend = frontend
        self._job = job
        self._events = events
        self._shape = shape

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange | None = scope.get(EXCHANGE)
        writer = None if exchange is None else exchange.writer()
        sink = None if writer is None else _ConnectionSink(writer, self._events)
        started, ends_at_once, end = False, len(self._job.generations) == 1, b""

        async def start() -> None:
            nonlocal started
            started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        try:
            async with aclosing(self._frontend.pieces(self._job, sink)) as pieces:
                async for piece in pieces:
                    if data := self._events.of(piece):
                        if not started:
                            await start()
                        if piece.finish is not None and ends_at_once:
                            end = data  # in one write with the events after it
                        else:
                            await send({"type": "http.response.body", "body": data, "more_body": True})
            last = end + self._events.end()
        except Exception as exc:
            if not started:
                await error_response(problem_of(exc), self._shape)(scope, receive, send)
                return
            last = end + self._events.failed(exc)
        if not started:
            await start()
        await send({"type": "http.response.body", "body": last, "more_body": False})


class _ConnectionSink:
    """Implements `frontend.sequence.PieceSink` over a connection."""

    def __init__(self, writer: PartWriter, events: Events) -> None:
        self.ready = writer.is_open
        self._writer = writer
        self._events = events

    def put(self, piece: Piece) -> None:
        if data := self._events.of(piece):
            self._writer.write(data)

    def text_writer(self, generation: Generation) -> Callable[[str], None] | None:
        around = self._events.around_text(generation)
        if around is None:
            return None
        (before, after), write = around, self._writer.write_three

        def put_text(text: str) -> None:
            if text:
                write(before, encode_json(text), after)

        return put_text


class DataEvents(Events):
    """Base of events without names, ended by [DONE]."""

    def __init__(self, shape: ErrorFormat) -> None:
        self._shape = shape

    def failed(self, error: Exception) -> bytes:
        return stream_error(error, self._shape) + DONE
