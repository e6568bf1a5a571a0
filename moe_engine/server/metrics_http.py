"""Counts of HTTP requests and answers, under SGLang's names."""

from __future__ import annotations

import prometheus_client as prom
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_engine.server.errors import CLIENT_GONE
from moe_engine.server.metrics import Metrics


class StatusCount:
    """ASGI middleware. Paths that no endpoint takes count as one, so that clients cannot make up label values."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        names = ["endpoint", "method"]
        self._requests = prom.Counter(
            "sglang:http_requests_total", "HTTP requests by endpoint.", names, registry=metrics.registry
        )
        self._responses = prom.Counter(
            "sglang:http_responses_total",
            "HTTP answers by endpoint and status; 499: the client had hung up.",
            [*names, "status_code"],
            registry=metrics.registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            route = scope.get("route")
            labels = {
                "endpoint": getattr(route, "path", "unknown"),
                "method": scope["method"] if route is not None else "unknown",
            }
            self._requests.labels(**labels).inc()
            self._responses.labels(**labels, status_code=str(status)).inc()
