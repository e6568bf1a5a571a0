"""HTTP application: routes, API keys, errors, metrics."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match

from moe_engine.errors import InputError
from moe_engine.frontend.client_api import EngineClient
from moe_engine.frontend.frontend import Frontend, Observer
from moe_engine.server.auth import KeyCheck
from moe_engine.server.bodies import Bodies
from moe_engine.server.body_work import body_work
from moe_engine.server.control_api import UNSUPPORTED_ENDPOINTS, ControlApi, internal_states, version
from moe_engine.server.edge import EdgeCheck
from moe_engine.server.errors import (
    ErrorFormat,
    Handler,
    Problem,
    error_format_of,
    error_response,
    guarded,
    native_body,
    openai_body,
)
from moe_engine.server.experts_api import ExpertsApi
from moe_engine.server.http_io import json_response
from moe_engine.server.metrics import Metrics
from moe_engine.server.metrics_http import StatusCount
from moe_engine.server.native_api import NativeApi
from moe_engine.server.observers import Observers, RequestLog
from moe_engine.server.openai_chat import ChatApi
from moe_engine.server.openai_completions import CompletionsApi
from moe_engine.server.openapi import ENDPOINTS, POLICY, docs_page, openapi
from moe_engine.server.parse_api import ParseApi
from moe_engine.server.settings import ServerSettings
from moe_engine.server.state import ServerState
from moe_engine.server.text_processes import TextProcesses, TextSpec
from moe_engine.tokenizer.chat_template import ChatTemplate, load_chat_template
from moe_engine.tokenizer.tokenizer import Tokenizer


def create_app(frontend: Frontend, client: EngineClient, settings: ServerSettings) -> FastAPI:
    """Builds the application over a running engine.

    Raises:
        ConfigError: the chat template cannot be read.
    """
    state = ServerState(frontend, client, settings, make_template(settings, frontend.tokenizer))
    state.bodies = Bodies(body_work(state), settings.max_body_bytes, _text_processes(state))
    # FastAPI's schema does not cover these endpoints, and its docs page loads scripts from the internet
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.state.server = state
    _add_openai(app, state)
    _add_native(app, state)
    _add_pages(app)
    metrics = _add_metrics(app, state)
    app.add_exception_handler(HTTPException, _no_such_route)
    keys = settings.args.server
    if keys.api_key or keys.admin_api_key:
        app.add_middleware(KeyCheck, api_key=keys.api_key, admin_api_key=keys.admin_api_key)
    app.add_middleware(EdgeCheck, check_origin=not keys.api_key)
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    if metrics is not None:
        app.add_middleware(StatusCount, metrics=metrics)
    return app


def _text_processes(state: ServerState) -> TextProcesses | None:
    """None if no other process can load the tokenizer."""
    tokenizer = state.frontend.tokenizer
    if tokenizer is not None and tokenizer.source is None:
        return None
    source = tokenizer.source if tokenizer else None
    return TextProcesses(TextSpec(source, state.chat_template, state.settings.without_keys(), state.client.info))


def make_template(settings: ServerSettings, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """The chat template of the flags, else of the checkpoint; None without one, or without a tokenizer.

    Raises:
        ConfigError: it cannot be read.
    """
    if tokenizer is None:
        return None
    return load_chat_template(settings.args.model.chat_template, tokenizer.chat_template, tokenizer.special_tokens)


def _route(app: FastAPI, paths: str, handler: Handler, shape: ErrorFormat, methods: str = "GET") -> None:
    endpoint = guarded(handler, shape)
    wanted = methods.split()
    if wanted == ["GET"]:  # not for endpoints with POST, which have side effects; uvicorn omits the body
        wanted.append("HEAD")
    for path in paths.split():
        for method in wanted:
            app.add_api_route(path, endpoint, methods=[method])


def _add_openai(app: FastAPI, state: ServerState) -> None:
    chat, completions = ChatApi(state), CompletionsApi(state)
    _route(app, "/v1/chat/completions", chat.chat_completions, openai_body, "POST")
    _route(app, "/v1/completions", completions.completions, openai_body, "POST")

    def card() -> dict[str, object]:
        return {
            "id": state.model_name,
            "object": "model",
            "created": int(state.started_at),
            "owned_by": "moe-engine",
            "root": client_root,
            "parent": None,
            "max_model_len": state.client.info.context_len,
        }

    client_root = state.client.info.model_path

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [card()]})

    async def model(request: Request) -> Response:
        state.find_model(request.path_params["model"])
        return json_response(card())

    _route(app, "/v1/models", models, openai_body)
    _route(app, "/v1/models/{model:path}", model, openai_body)


def _add_native(app: FastAPI, state: ServerState) -> None:
    native, control, parse = NativeApi(state), ControlApi(state), ParseApi(state)
    _route(app, "/generate", native.generate, native_body, "POST PUT")
    _route(app, "/abort_request", native.abort_request, native_body, "POST")
    _route(app, "/flush_cache", native.flush_cache, native_body, "GET POST")
    _route(app, "/tokenize /v1/tokenize", native.tokenize, native_body, "POST")
    _route(app, "/detokenize /v1/detokenize", native.detokenize, native_body, "POST")
    _route(app, "/separate_reasoning", parse.separate_reasoning, native_body, "POST")
    _route(app, "/parse_function_call", parse.parse_function_call, native_body, "POST")
    _route(app, "/health /ready /ping", control.health, native_body)
    _route(app, "/health_generate", control.health_generate, native_body)
    _route(app, "/model_info /get_model_info", control.model_info, native_body)
    _route(app, "/server_info /get_server_info", control.server_info, native_body)
    _route(app, "/v1/loads", control.loads, native_body)
    _route(app, "/get_load", control.get_load, native_body)
    experts = ExpertsApi(state)
    _route(app, "/start_expert_distribution_record", experts.start, native_body, "GET POST")
    _route(app, "/stop_expert_distribution_record", experts.stop, native_body, "GET POST")
    _route(app, "/dump_expert_distribution_record", experts.dump, native_body, "GET POST")
    _route(app, "/experts", experts.page, native_body)
    _route(app, "/experts/data", experts.data, native_body)
    for path in UNSUPPORTED_ENDPOINTS:
        shape = error_format_of(path)
        _route(app, path, control.not_implemented, shape, "GET POST PUT")


def _add_pages(app: FastAPI) -> None:
    async def root(request: Request) -> Response:
        paths = sorted(endpoint.path for endpoint in ENDPOINTS)
        return json_response({"server": "moe-engine", "docs": "/docs", "endpoints": paths})

    async def description(request: Request) -> Response:
        return json_response(openapi(version()))

    async def docs(request: Request) -> Response:
        page = docs_page(version(), str(request.base_url).rstrip("/"))
        return Response(page, media_type="text/html", headers={"content-security-policy": POLICY})

    _route(app, "/", root, native_body)
    _route(app, "/openapi.json", description, native_body)
    _route(app, "/docs", docs, native_body)


def _add_metrics(app: FastAPI, state: ServerState) -> Metrics | None:
    observers: list[Observer] = [state.frontend.observer] if state.frontend.observer else []
    flags = state.settings.args.logging
    if flags.log_requests:
        observers.append(RequestLog(flags.log_requests_level))
    metrics = Metrics(state.model_name, state.client.info, version()) if flags.enable_metrics else None
    if metrics is not None:
        observers.append(metrics)
    if observers:
        state.frontend.observer = observers[0] if len(observers) == 1 else Observers(*observers)

    async def page(request: Request) -> Response:
        if metrics is None:
            raise InputError("metrics are off; start the server with --enable-metrics", status=404)
        body = metrics.render(state.client, await internal_states(state))
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    _route(app, "/metrics", page, native_body)
    return metrics


async def _no_such_route(request: Request, exc: Exception) -> Response:
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    path, method = request.url.path, request.method
    allowed = _methods_of(request) if status == 405 else ""
    message = f"{method} {path}: no such endpoint" if status == 404 else f"{method} {path}: not allowed; use {allowed}"
    problem = Problem(status, message, "NotFoundError" if status == 404 else "BadRequestError", None, status)
    response = error_response(problem, error_format_of(path))
    if allowed:
        response.headers["allow"] = allowed
    return response


def _methods_of(request: Request) -> str:
    """HTTP methods of the request's path."""
    matching = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    return ", ".join(sorted({method for route in matching for method in getattr(route, "methods", None) or ()}))
