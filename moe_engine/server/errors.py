"""Every failure as an HTTP answer: OpenAI's shape on /v1, SGLang's on the native endpoints."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import msgspec
from fastapi import Request, Response

from moe_engine.errors import EngineDeadError, GenerationError, InputError, NotAvailableYet

logger = logging.getLogger("moe_engine.server")

CLIENT_GONE = 499
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "NotFoundError", 413: "invalid_request_error"}


class ClientGoneError(Exception):
    """The client hung up; nobody reads the answer."""


class ModelNotFoundError(InputError):
    """A request names a model that is not served here."""

    def __init__(self, model: str, served: str) -> None:
        super().__init__(f"The model {model!r} does not exist; this server has {served!r}.", field="model", status=404)


class FailedElsewhereError(Exception):
    """A request failed in another process, which named the problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass(frozen=True)
class Problem:
    """What a client is told of a failure."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None

    def fields(self) -> dict[str, Any]:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}


def problem_of(exc: BaseException) -> Problem:
    """Names a failure for the client. What nobody foresaw is logged with its traceback."""
    if isinstance(exc, FailedElsewhereError):
        return exc.problem
    if isinstance(exc, ModelNotFoundError):
        return Problem(404, exc.message, "invalid_request_error", exc.field, "model_not_found")
    if isinstance(exc, InputError):
        kind = _TYPES.get(exc.status, "InternalServerError" if exc.status >= 500 else "BadRequestError")
        return Problem(exc.status, exc.message, kind, exc.field, exc.status)
    if isinstance(exc, EngineDeadError):
        return Problem(503, f"The engine is not running: {exc}", "ServiceUnavailableError", None, 503)
    if isinstance(exc, GenerationError):
        return Problem(500, str(exc), "InternalServerError", None, 500)
    if isinstance(exc, NotAvailableYet):
        return Problem(501, str(exc), "NotImplementedError", None, 501)
    logger.error("request failed: %s", exc, exc_info=exc)
    return Problem(500, f"Internal error ({type(exc).__name__}: {exc})", "InternalServerError", None, 500)


def openai_body(problem: Problem) -> dict[str, Any]:
    """OpenAI's fields at the top (as SGLang has them) and under "error" (where OpenAI's own client looks)."""
    fields = problem.fields()
    return {"object": "error", **fields, "error": fields}


def native_body(problem: Problem) -> dict[str, Any]:
    return {"error": problem.fields()}


def error_format_of(path: str) -> ErrorFormat:
    """How errors of a path look."""
    return openai_body if path.startswith("/v1") else native_body


ErrorFormat = Callable[[Problem], dict[str, Any]]
Handler = Callable[[Request], Awaitable[Response]]


def error_response(problem: Problem, shape: ErrorFormat) -> Response:
    response = Response(msgspec.json.encode(shape(problem)), problem.status, media_type="application/json")
    if problem.status in (408, 413, 431):
        response.headers["connection"] = "close"  # the rest of the body is not wanted
    if problem.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


def stream_error(exc: Exception) -> bytes:
    """The event that ends a stream in which something went wrong."""
    problem = problem_of(exc)
    return b"data: " + msgspec.json.encode({"error": problem.fields()}) + b"\n\n"


def guarded(handler: Handler, shape: ErrorFormat) -> Handler:
    """A handler whose failures become answers, and touch no other request."""

    @wraps(handler)
    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)
        except Exception as exc:
            return error_response(problem_of(exc), shape)

    return run
