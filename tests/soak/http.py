"""A small HTTP/1.1 client on asyncio streams: it can disconnect in the middle of a body, in either direction.

A client library would hide the connection; the soak closes, resets and half-closes connections on purpose.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

LINE_LIMIT = 1 << 26
"""Max bytes of a line; an event of a stream is one line."""


class Response:
    """Status and body of one answer. The body must be read to its end, or the connection dropped."""

    def __init__(self, status: int, headers: dict[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader

    async def blocks(self) -> AsyncIterator[bytes]:
        """The parts of the body as they arrive."""
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int(await self._reader.readline(), 16):
                block = await self._reader.readexactly(size + 2)
                yield block[:-2]
            await self._reader.readline()
        elif size := int(self.headers.get("content-length", "0")):
            yield await self._reader.readexactly(size)

    async def read(self) -> bytes:
        return b"".join([block async for block in self.blocks()])

    async def json(self) -> Any:
        return json.loads(await self.read())

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The JSON objects of an event stream. Raises EOFError when the stream ends without ``[DONE]``."""
        rest, done = b"", False
        async for block in self.blocks():
            *events, rest = (rest + block).split(b"\n\n")
            for event in events:
                if event == b"data: [DONE]":
                    done = True
                elif event.startswith(b"data: "):
                    yield json.loads(event[6:])
        if not done:
            raise EOFError("the stream ended without [DONE]")


class Connection:
    """One keep-alive connection, opened on demand."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, method: str, path: str, body: Any = None, *, rid: str = "") -> Response:
        """Sends a request and reads the head of its answer. A `body` that is not bytes is sent as JSON."""
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        for attempt in range(2):
            fresh = self._streams is None
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=LINE_LIMIT)
            reader, writer = self._streams
            try:
                writer.write(head.encode() + content)
                await writer.drain()
                return await self._head(reader)
            except (ConnectionError, EOFError):
                self.drop()
                if fresh or attempt:
                    raise
        raise AssertionError("unreachable")

    async def _head(self, reader: asyncio.StreamReader) -> Response:
        line = await reader.readline()
        if not line:
            raise ConnectionResetError("the server closed the connection before an answer")
        status = int(line.split()[1])
        headers = {}
        while (line := (await reader.readline()).strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip().lower()
        return Response(status, headers, reader)

    async def fetch(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Returns status and whole body."""
        response = await self.send(method, path, body)
        content = await response.read()
        if response.headers.get("connection") == "close":
            self.drop()
        return response.status, content

    def drop(self, *, reset: bool = False) -> None:
        """Closes the connection at once, also during a transfer; with `reset` by RST instead of FIN."""
        if self._streams is not None:
            writer = self._streams[1]
            if reset:
                writer.transport.abort()
            else:
                writer.close()
            self._streams = None
