"""An HTTP server that gives every request the same answer."""

import asyncio
import json
from typing import Any


class CannedServer:
    """Listens on a free port within `async with`.

    Attributes:
        url: its address.
        seen: path and JSON body of each request.
        most: requests that were open at once.
    """

    def __init__(
        self, body: bytes, status: int = 200, *, seconds: float = 0.0, chunk: int = 0, cut: int | None = None
    ) -> None:
        """`chunk`: bytes of each HTTP chunk (0: an answer with its length); `cut`: bytes after which the connection is
        closed."""
        self._body, self._status, self._seconds = body, status, seconds
        self._chunk, self._cut = chunk, cut
        self.seen: list[tuple[str, Any]] = []
        self.headers: list[bytes] = []
        self.open = self.most = 0

    async def __aenter__(self) -> "CannedServer":
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most = max(self.most, self.open)
        head = await reader.readuntil(b"\r\n\r\n")
        self.headers.append(head)
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        self.seen.append((head.split()[1].decode(), json.loads(await reader.readexactly(length))))
        await asyncio.sleep(self._seconds)
        self.open -= 1
        answer = f"HTTP/1.1 {self._status} X\r\n".encode()
        if self._chunk:
            answer += b"Transfer-Encoding: chunked\r\n\r\n"
            for i in range(0, len(self._body), self._chunk):
                piece = self._body[i : i + self._chunk]
                answer += f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
            answer += b"0\r\n\r\n"
        else:
            answer += f"Content-Length: {len(self._body)}\r\n\r\n".encode() + self._body
        writer.write(answer[: self._cut])
        await writer.drain()
        writer.close()
