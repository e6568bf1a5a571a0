"""Counters of HTTP requests and responses, under SGLang's names."""

from __future__ import annotations

import prometheus_client as prom
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_engine.server.errors import CLIENT_CLOSED_REQUEST
from moe_engine.server.metrics import Metrics


class ObservedSend:
    """ASGI's `send`, with the status of the response; 499 until it begins."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = CLIENT_CLOSED_REQUEST

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


class StatusCount:
    """ASGI middleware. Unknown paths share one label value, so that clients cannot create label values."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        names = ["endpoint", "method"]
        self._requests = prom.Counter(
            "sglang:http_requests_total", "HTTP requests by endpoint.", names, registry=metrics.registry
        )
        self._responses = prom.Counter(
            "sglang:http_responses_total",
            "HTTP responses by endpoint and status; 499: the client disconnected.",
            [*names, "status_code"],
            registry=metrics.registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        response = ObservedSend(send)
        try:
            await self._app(scope, receive, response)
        finally:
            route = scope.get("route")
            labels = {
                "endpoint": getattr(route, "path", "unknown"),
                "method": scope["method"] if route is not None else "unknown",
            }
            self._requests.labels(**labels).inc()
            self._responses.labels(**labels, status_code=str(response.status)).inc()
