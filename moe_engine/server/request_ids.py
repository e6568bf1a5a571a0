"""Middleware that every request passes first: its id for logs (`X-Request-Id`), and its path without a proxy's prefix
and without slashes at the end."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
_ACCEPTED = re.compile(rb"[\x21-\x7e]{1,128}")

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the HTTP request that runs in this context; empty outside a request."""


class RequestIds:
    """ASGI middleware. Every response has the request's `X-Request-Id`: the client's or the proxy's, else a new one.

    Args:
        root_path: prefix of paths behind a proxy (`--fastapi-root-path`), removed from paths that have it: a proxy may
            strip it or not.
        more: further headers of every response.
    """

    def __init__(self, app: ASGIApp, root_path: str = "", more: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._app = app
        self._root_path = root_path
        self._more = tuple(more)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        value = given if _ACCEPTED.fullmatch(given) else uuid.uuid4().hex.encode()

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (HEADER, value), *self._more]
            await send(message)

        path = scope["path"]
        if self._root_path and path.startswith(self._root_path + "/"):
            path = path[len(self._root_path) :]
        if path.endswith("/"):  # SGLang and vLLM redirect such paths, which not every client follows
            path = path.rstrip("/") or "/"
        if path != scope["path"]:
            scope = {**scope, "path": path}
        token = request_id.set(value.decode())
        try:
            await self._app(scope, receive, with_id)
        finally:
            request_id.reset(token)
