"""HTTP error responses: Anthropic's format on /v1/messages, Ollama's on /api, else OpenAI's and SGLang's in one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moe_engine.errors import EngineDeadError, GenerationError, InputError, RankLostError
from moe_engine.server.openai.answers import ErrorFields
from moe_engine.server.request_ids import request_id

logger = logging.getLogger("moe_engine.server")

CLIENT_CLOSED_REQUEST = 499
EXCHANGE = "moe_engine.exchange"
"""Key of the request's `http_protocol.Exchange` in ASGI's scope."""
DISCARD_SECONDS = 5.0
RETRY_AFTER = "1"
"""Seconds after which a client may try again: the queue was full, or the server is restarting."""
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "NotFoundError", 413: "invalid_request_error",
          501: "NotImplementedError"}  # fmt: skip
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
NO_THREAD = "can't start new thread"
"""Python's RuntimeError."""
NO_PROCESS = (
    "The system lets the server start no further process or thread: raise `ulimit -u`, or its container's limit of "
    "processes"
)
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Tool runners of Anthropic's clients send the whole conversation instead after an error with these details."""


class ClientDisconnectedError(Exception):
    """The client disconnected; the response is not needed."""


class ModelNotFoundError(InputError):
    """A request names a model that is not served here."""

    def __init__(self, model: str, served: str) -> None:
        super().__init__(f"The model {model!r} does not exist; this server has {served!r}.", field="model", status=404)


class RemoteProblemError(Exception):
    """A request failed in another process, which reported the problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass(frozen=True)
class Problem:
    """A failure as reported to the client."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None

    def fields(self) -> ErrorFields:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}


def problem_of(exc: BaseException) -> Problem:
    """Converts an exception for the client. Unexpected ones are logged with their traceback."""
    if isinstance(exc, RemoteProblemError):
        return exc.problem
    if isinstance(exc, ModelNotFoundError):
        return Problem(404, exc.message, "invalid_request_error", exc.field, "model_not_found")
    if isinstance(exc, InputError):
        kind = _TYPES.get(exc.status, "InternalServerError" if exc.status >= 500 else "BadRequestError")
        return Problem(exc.status, exc.message, kind, exc.field, exc.status)
    if isinstance(exc, EngineDeadError):
        message = str(exc) if isinstance(exc, RankLostError) else f"The engine is not running: {exc}"
        return Problem(503, message, "ServiceUnavailableError", None, 503)
    if isinstance(exc, GenerationError):
        return Problem(500, str(exc), "InternalServerError", None, 500)
    logger.error("request %s failed: %s", request_id.get(), exc, exc_info=exc)
    if isinstance(exc, BlockingIOError) or str(exc) == NO_THREAD:
        return Problem(503, NO_PROCESS, "InternalServerError", None, 503)
    return Problem(500, f"Internal error ({type(exc).__name__}: {exc})", "InternalServerError", None, 500)


def openai_body(problem: Problem) -> dict[str, Any]:
    """OpenAI's fields at top level (as in SGLang) and under "error" (where OpenAI's client reads them)."""
    fields = problem.fields()
    return {"object": "error", **fields, "error": fields}


def anthropic_body(problem: Problem) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    more = {"details": NO_THREADS} if problem.param == "thread" else {}
    return {"type": "error", "error": {"type": kind, "message": problem.message, **more}}


def ollama_body(problem: Problem) -> dict[str, Any]:
    return {"error": problem.message}


def error_format_of(path: str) -> ErrorFormat:
    """Error format of a path."""
    if path.startswith("/api/"):
        return ollama_body
    if path.startswith("/v1/messages"):
        return anthropic_body
    return openai_body


ErrorFormat = Callable[[Problem], dict[str, Any]]
Handler = Callable[[Request], Awaitable[Response]]


class UnreadBodyResponse(Response):
    """Discards the rest of the request's body behind the response, for at most `DISCARD_SECONDS`: the system resets a
    connection that is closed with unread bytes, and some clients and proxies (Envoy) lose the response then."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        exchange = scope.get(EXCHANGE)
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while exchange is not None and exchange.has_unread_body:
                    await receive()
        await send({"type": "http.response.body", "body": b""})


def error_response(problem: Problem, shape: ErrorFormat) -> Response:
    kind = UnreadBodyResponse if problem.status == 413 else Response
    response = kind(msgspec.json.encode(shape(problem)), problem.status, media_type="application/json")
    if problem.status in (408, 413, 431):
        response.headers["connection"] = "close"  # the rest of the body is not read
    if problem.status in (429, 503):
        response.headers["retry-after"] = RETRY_AFTER
    if problem.status == 501:
        response.headers["x-should-retry"] = "false"  # OpenAI's and Anthropic's clients repeat requests with a 5xx
    if problem.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


def stream_error(exc: Exception, shape: ErrorFormat) -> bytes:
    """The event that ends a failed stream."""
    problem = problem_of(exc)
    if shape is anthropic_body:
        return b"event: error\ndata: " + msgspec.json.encode(anthropic_body(problem)) + b"\n\n"
    if shape is ollama_body:
        return msgspec.json.encode(ollama_body(problem)) + b"\n"
    return b"data: " + msgspec.json.encode({"error": problem.fields()}) + b"\n\n"


def guarded(handler: Handler, shape: ErrorFormat) -> Handler:
    """A handler whose exceptions become error responses and do not affect other requests."""

    @wraps(handler)
    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnectedError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as exc:
            return error_response(problem_of(exc), shape)

    return run
