"""HTTP application: routes, API keys, errors, metrics."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from moe_engine import __version__
from moe_engine.errors import nearest
from moe_engine.frontend.client_api import EngineClient
from moe_engine.frontend.frontend import Frontend, Observer
from moe_engine.server.auth import KeyCheck
from moe_engine.server.bodies import Bodies
from moe_engine.server.body_work import body_work
from moe_engine.server.doctor_api import History
from moe_engine.server.edge import EdgeCheck
from moe_engine.server.endpoints import endpoints
from moe_engine.server.errors import Handler, Problem, error_format_of, error_response, guarded
from moe_engine.server.metrics import Buckets, Metrics
from moe_engine.server.metrics_http import StatusCount
from moe_engine.server.observers import RequestTimeLog
from moe_engine.server.request_ids import RequestIds
from moe_engine.server.request_log import RequestLog, RequestLogSettings
from moe_engine.server.responses.store import ResponseStore
from moe_engine.server.settings import ServerSettings
from moe_engine.server.state import ServerState
from moe_engine.server.text_processes import TextProcesses, TextSpec
from moe_engine.tokenizer.chat_messages import ChatEncoder
from moe_engine.tokenizer.chat_template import load_chat_template
from moe_engine.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from moe_engine.server.tracing import Tracing


class _Cors(CORSMiddleware):
    """Starlette's middleware reads every message of every response; only responses to web pages need further
    headers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and all(name != b"origin" for name, _ in scope["headers"]):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class _Endpoint:
    """ASGI application of a guarded handler. Starlette's application for functions handles exceptions that no handler
    here raises."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._handler(Request(scope, receive, send))
        await response(scope, receive, send)


class _EndpointRoute(Route):
    def __init__(self, path: str, handler: Handler, methods: list[str]) -> None:
        super().__init__(path, _Endpoint(handler), methods=methods)
        if self.methods is not None and "POST" in methods:  # POST has side effects, HEAD must not
            self.methods.discard("HEAD")

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if not self.param_convertors and scope["path"] != self.path:
            return Match.NONE, {}  # a comparison costs a tenth of Starlette's regular expression
        match, child = super().matches(scope)
        return match, {**child, "route": self}  # for the metrics


def create_app(frontend: Frontend, client: EngineClient, settings: ServerSettings) -> Starlette:
    """Builds the application over a running engine.

    Raises:
        ConfigError: the chat template cannot be read.
    """
    template = make_template(settings, frontend.tokenizer)
    state = ServerState(frontend, client, settings, template, ResponseStore())
    state.bodies = Bodies(body_work(state), settings.max_body_bytes, _text_processes(state))
    app = Starlette()
    app.router.redirect_slashes = False
    app.state.server = state
    tracing = _open_tracing(state)
    app.state.tracing = tracing
    metrics = _observe(state, tracing)
    app.state.history = History()
    app.state.endpoints = tuple(endpoints(state, metrics, app.state.history))
    for endpoint in app.state.endpoints:
        for path in endpoint.paths:
            handler = guarded(endpoint.handler, error_format_of(path))
            app.router.routes.append(_EndpointRoute(path, handler, methods=endpoint.methods))
    app.add_exception_handler(HTTPException, _no_such_route)
    keys = settings.args.server
    if keys.api_key or keys.admin_api_key:
        app.add_middleware(KeyCheck, api_key=keys.api_key, admin_api_key=keys.admin_api_key)
    app.add_middleware(EdgeCheck, check_origin=not keys.api_key)
    app.add_middleware(
        _Cors,
        allow_origins=["*"],
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", "x-should-retry"],
    )
    if metrics is not None:
        app.add_middleware(StatusCount, metrics=metrics)
    if tracing is not None:
        from moe_engine.server.tracing import TraceRequests

        app.add_middleware(TraceRequests, tracing=tracing)
    simulated = settings.args.speculative.speculative_simulated_accept_length
    marks = [] if simulated is None else [(b"x-simulated-accept-length", f"{simulated:g}".encode())]
    app.add_middleware(RequestIds, root_path=keys.fastapi_root_path, more=marks)
    return app


def _text_processes(state: ServerState) -> TextProcesses | None:
    """None if no other process can load the tokenizer."""
    tokenizer = state.frontend.tokenizer
    if tokenizer is not None and tokenizer.source is None:
        return None
    source = tokenizer.source if tokenizer else None
    return TextProcesses(TextSpec(source, state.chat_template, state.settings.without_keys(), state.client.info))


def make_template(settings: ServerSettings, tokenizer: Tokenizer | None) -> ChatEncoder | None:
    """The chat template of the flags, else of the checkpoint or its type; None without one, or without a tokenizer.

    Raises:
        ConfigError: it cannot be read.
    """
    if tokenizer is None:
        return None
    return load_chat_template(
        settings.args.model.chat_template, tokenizer.chat_template, tokenizer.special_tokens, tokenizer.folder
    )


def _open_tracing(state: ServerState) -> Tracing | None:
    """None without `--enable-trace`: OpenTelemetry is imported only with it."""
    flags = state.settings.args.logging
    if not flags.enable_trace:
        return None
    from moe_engine.server.tracing import Tracing

    return Tracing.over_http(flags.otlp_traces_endpoint, state.model_name, __version__, flags.otlp_service_name)


def _observe(state: ServerState, tracing: Tracing | None) -> Metrics | None:
    """Adds the observers of the settings to the frontend."""
    observers: list[Observer] = []
    flags = state.settings.args.logging
    if flags.log_requests:
        observers.append(RequestLog(RequestLogSettings.of(flags)))
    if flags.enable_request_time_stats_logging:
        observers.append(RequestTimeLog())
    if tracing is not None:
        observers.append(tracing)
    metrics = None
    if flags.enable_metrics:
        labels = json.loads(flags.extra_metric_labels)
        metrics = Metrics(state.model_name, state.client.info, __version__, Buckets.of(flags), labels)
        observers.append(metrics)
    state.frontend.observers = tuple(observers)
    return metrics


async def _no_such_route(request: Request, exc: Exception) -> Response:
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    path, method = request.url.path, request.method
    allowed = _methods_of(request) if status == 405 else ""
    near = _near_path(request) if status == 404 else None
    missing = f"no such endpoint; did you mean {near}?" if near else "no such endpoint"
    message = f"{method} {path}: {missing if status == 404 else f'not allowed; use {allowed}'}"
    problem = Problem(status, message, "NotFoundError" if status == 404 else "BadRequestError", None, status)
    response = error_response(problem, error_format_of(path))
    if allowed:
        response.headers["allow"] = allowed
    return response


def _near_path(request: Request) -> str | None:
    """The endpoint without or with one more `/v1`: clients differ in whether their base URL contains it. Else one with
    nearly the same name."""
    path, routes = request.scope["path"], request.app.routes
    near = path.removeprefix("/v1") if path.startswith("/v1/") else f"/v1{path}"
    scope = {**request.scope, "path": near}
    if any(route.matches(scope)[0] is Match.FULL for route in routes):
        return near
    return nearest(path, [route.path for route in routes if isinstance(route, Route)], cutoff=0.85)


def _methods_of(request: Request) -> str:
    """HTTP methods of the request's path."""
    matching = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    return ", ".join(sorted({method for route in matching for method in getattr(route, "methods", None) or ()}))
