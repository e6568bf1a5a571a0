"""Middleware that rejects requests before any endpoint: oversized headers, and cross-origin web pages (CSRF).

A server without a key on a developer's machine trusts every request, and any web page that the developer visits can
send one: `<img src="http://localhost:30000/dump_expert_distribution_record">` is enough. Browsers report a request's
origin in headers that a page cannot change. Programs send none of these headers and are not affected.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from moe_engine.server.auth import changes_engine
from moe_engine.server.errors import Problem, error_format_of, error_response
from moe_engine.server.http_protocol import MAX_HEAD_BYTES

SIMPLE_TYPES = ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
"""Content types that a page may send cross-origin without a CORS preflight."""


class EdgeCheck:
    """ASGI middleware.

    Args:
        check_origin: refuse cross-origin requests of web pages that change the engine or that had no CORS preflight.
            Not needed with an API key, which such a page does not have.
    """

    def __init__(self, app: ASGIApp, check_origin: bool) -> None:
        self._app = app
        self._check_origin = check_origin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] == "http" else None
        if problem is not None:
            await error_response(problem, error_format_of(scope["path"]))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> Problem | None:
        size = len(scope["query_string"]) + sum(len(name) + len(value) for name, value in scope["headers"])
        if size > MAX_HEAD_BYTES:
            words = f"the request's headers are larger than this server accepts ({MAX_HEAD_BYTES} bytes)"
            return Problem(431, words, "invalid_request_error", None, 431)
        headers = Headers(scope=scope)
        if not self._check_origin or not is_cross_origin(headers):
            return None
        if changes_engine(scope["path"]):
            words = f"{scope['path']}: refused to web pages of other origins, as it changes the engine; "
            return Problem(403, words + "call it from a program, or set --api-key", "permission_error", None, 403)
        content = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and content in SIMPLE_TYPES:
            words = "Content-Type: web pages of other origins must send application/json"
            return Problem(403, words, "permission_error", None, 403)
        return None


def is_cross_origin(headers: Headers) -> bool:
    """Whether a browser sent the request for a page of another origin."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
