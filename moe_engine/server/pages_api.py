"""The served model, metrics, and the description of the API."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moe_engine import __version__
from moe_engine.errors import InputError
from moe_engine.sampling_checks import parse_sampling
from moe_engine.server.anthropic_types import model_info
from moe_engine.server.control_api import internal_states
from moe_engine.server.http_io import json_response
from moe_engine.server.live_pages import HEADERS, page, wants_page
from moe_engine.server.metrics import Metrics
from moe_engine.server.native_types import Root
from moe_engine.server.openai.answers import ModelCard, ModelList
from moe_engine.server.openapi import HTML, POLICY, docs_page, openapi
from moe_engine.server.state import ServerState


class PagesApi:
    def __init__(self, state: ServerState, metrics: Metrics | None) -> None:
        self._state = state
        self._metrics = metrics

    async def models(self, request: Request) -> Response:
        """The served model and its LoRA adapters."""
        adapters = self._state.frontend.adapters.paths
        cards = [self._card(), *(self._card(name, path) for name, path in adapters.items())]
        if _is_anthropic(request):
            listed = [model_info(card) for card in cards]
            ends = {"has_more": False, "first_id": listed[0]["id"], "last_id": listed[-1]["id"]}
            return json_response({"data": listed, **ends})
        answer: ModelList = {"object": "list", "data": cards}
        return json_response(answer)

    async def model(self, request: Request) -> Response:
        """The served model or a LoRA adapter, by name."""
        name = request.path_params["model"]
        if (path := self._state.frontend.adapters.paths.get(name)) is not None:
            card = self._card(name, path)
        else:
            self._state.find_model(name)
            card = self._card()
        return json_response(model_info(card) if _is_anthropic(request) else card)

    def _card(self, adapter: str | None = None, path: str = "") -> ModelCard:
        return {
            "id": adapter or self._state.model_name,
            "object": "model",
            "created": int(self._state.started_at),
            "owned_by": "moe-engine",
            "root": path if adapter else self._state.client.info.model_path,
            "parent": self._state.model_name if adapter else None,
            "max_model_len": self._state.client.info.context_len,
        }

    async def measured(self, request: Request) -> Response:
        """Prometheus metrics, with --enable-metrics."""
        if self._metrics is None:
            raise InputError("metrics are off; start the server with --enable-metrics", status=404)
        body = self._metrics.render(self._state.client, await internal_states(self._state))
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def root(self, request: Request) -> Response:
        """List of endpoints, for browsers a page: state, chat, JSON schemas."""
        if wants_page(request.headers.get("accept", "")):
            return Response(page("status_page"), media_type=HTML, headers={**HEADERS, "vary": "accept"})
        paths = sorted({path for endpoint in request.app.state.endpoints for path in endpoint.shown_paths})
        answer: Root = {"server": "moe-engine", "docs": "/docs", "endpoints": paths}
        response = json_response(answer)
        response.headers["vary"] = "accept"
        return response

    async def description(self, request: Request) -> Response:
        """OpenAPI description (JSON)."""
        return json_response(self._described(request))

    async def docs(self, request: Request) -> Response:
        """This page."""
        page = docs_page(self._described(request), str(request.base_url).rstrip("/"))
        return Response(page, media_type=HTML, headers={"content-security-policy": POLICY})

    def _described(self, request: Request) -> dict[str, Any]:
        settings = self._state.settings
        native = parse_sampling(settings.frontend.preferred_sampling_params)
        model = parse_sampling(settings.sampling_defaults)
        found = openapi(request.app.state.endpoints, __version__, native, model)
        root = self._state.flags.fastapi_root_path
        return {**found, "servers": [{"url": root}]} if root else found


def _is_anthropic(request: Request) -> bool:
    """Whether the request is of Anthropic's API, whose clients send their version."""
    return "anthropic-version" in request.headers
