"""OpenTelemetry traces (`--enable-trace`): a span per POST request, and below it one per sequence with its phases.

::

    POST /v1/chat/completions      the HTTP request, until the last byte of the response
      tokenize                     decoding, chat template, tokenization
      chat MODEL                   a sequence, attributes of the semantic conventions `gen_ai`
        queue, prefill, decode

A `traceparent` header makes the request's span a child of the client's. Probes and scrapes (GET) have no span. The
SDK's own variables configure the rest: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER,
OTEL_EXPORTER_OTLP_HEADERS.

Sources: https://opentelemetry.io/docs/specs/semconv/gen-ai/ and https://www.w3.org/TR/trace-context/.
"""

from __future__ import annotations

import time
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Receive, Scope, Send

from moe_engine.frontend.generation import Generation
from moe_engine.frontend.sequence import Observer
from moe_engine.server.errors import CLIENT_CLOSED_REQUEST
from moe_engine.server.metrics_http import ObservedSend
from moe_engine.server.trace_context import RequestTrace, request_trace

_HEADERS = (b"traceparent", b"tracestate")
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/encode": "embeddings",
}
"""`gen_ai.operation.name` by path. Other paths keep their own name, which the conventions allow."""


def otlp_exporter(endpoint: str) -> OTLPSpanExporter:
    """OTLP over HTTP with protobuf. `endpoint`: HOST:PORT, or a URL; a URL without a path gets `/v1/traces`."""
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return OTLPSpanExporter(endpoint=f"{scheme}://{host}/{path if slash and path else 'v1/traces'}")


class Tracing(Observer):
    """Makes and exports the spans: an `Observer` of the frontend, and the tracer of `TraceRequests`.

    Args:
        processor: the SDK's span processor with its exporter.
        model: the served model's name.
        service: name of the service; None: that of the SDK's variables, else moe-engine.
    """

    def __init__(self, processor: Any, model: str, version: str, service: str | None = None) -> None:
        resource = Resource.create({"service.version": version})  # with the SDK's variables
        if service is None and str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            service = "moe-engine"
        if service is not None:
            resource = resource.merge(Resource({SERVICE_NAME: service}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self.tracer = self._provider.get_tracer("moe_engine", version)
        self._model = model
        self._traces: dict[Generation, RequestTrace] = {}

    @classmethod
    def over_http(cls, endpoint: str, model: str, version: str, service: str | None) -> Tracing:
        """Exports to a collector from a thread; spans that the collector cannot accept are dropped after the SDK's
        retries."""
        return cls(BatchSpanProcessor(otlp_exporter(endpoint)), model, version, service)

    def close(self) -> None:
        """Exports the remaining spans."""
        self._provider.shutdown()

    # -- Observer

    def received(self, generation: Generation) -> None:
        found = request_trace.get()
        if found is None or not trace.get_current_span(found.context).is_recording():
            return
        self._traces[generation] = found
        if found.body_read_at is not None and not found.is_tokenized:
            found.is_tokenized = True
            self._phase("tokenize", found.context, found.body_read_at, generation.received_at)

    def finished(self, generation: Generation) -> None:
        found = self._traces.pop(generation, None)
        if found is None:
            return
        operation = _OPERATIONS.get(found.path, found.path.strip("/"))
        attributes = {"gen_ai.operation.name": operation} | _attributes(generation, self._model)
        end = generation.finished_at or time.monotonic()
        name = f"{operation} {self._model}"
        span = self.tracer.start_span(
            name, found.context, start_time=_unix_ns(generation.received_at), attributes=attributes
        )
        if (error := _error_of(generation)) is not None:
            span.set_attribute("error.type", "abort")
            span.set_status(Status(StatusCode.ERROR, error))
        context = trace.set_span_in_context(span, found.context)
        first = generation.first_token_at
        if generation.finish is not None:  # the engine reports the time in the queue with the end
            admitted = min(generation.received_at + generation.queue_time, first or end)
            self._phase("queue", context, generation.received_at, admitted)
            self._phase("prefill", context, admitted, first or end)
        if first is not None:
            self._phase("decode", context, first, end)
        span.end(_unix_ns(end))

    def _phase(self, name: str, context: Any, begin: float, end: float) -> None:
        self.tracer.start_span(name, context, start_time=_unix_ns(begin)).end(_unix_ns(max(begin, end)))


class TraceRequests:
    """ASGI middleware: the span of a POST request, child of the client's span if the headers name one."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracer = tracing.tracer
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        carrier = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _HEADERS}
        context = self._propagator.extract(carrier)
        span = self._tracer.start_span(
            "POST",
            context,
            SpanKind.SERVER,
            attributes={"http.request.method": "POST", "url.path": scope["path"], "url.scheme": scope["scheme"]},
        )
        response = ObservedSend(send)
        token = request_trace.set(RequestTrace(trace.set_span_in_context(span, context), scope["path"]))
        try:
            await self._app(scope, receive, response)
        finally:
            request_trace.reset(token)
            _end_request(span, scope, response.status)


def _end_request(span: Span, scope: Scope, status: int) -> None:
    route = getattr(scope.get("route"), "path", None)
    if route is not None:
        span.update_name(f"POST {route}")
        span.set_attribute("http.route", route)
    span.set_attribute("http.response.status_code", status)
    if status >= 500 or status == CLIENT_CLOSED_REQUEST:
        span.set_attribute("error.type", str(status))
        span.set_status(Status(StatusCode.ERROR))
    span.end()


def _attributes(generation: Generation, model: str) -> dict[str, Any]:
    """Attributes of the conventions, and latencies in seconds under the names of SGLang and vLLM."""
    sampling, finish = generation.sampling, generation.finish
    found = {
        "gen_ai.provider.name": "moe-engine",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": generation.rid,
        "gen_ai.response.finish_reasons": None if finish is None else [finish["type"]],
        "gen_ai.request.max_tokens": generation.request.max_new_tokens,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.top_k": float(sampling.top_k),
        "gen_ai.request.frequency_penalty": float(sampling.frequency_penalty),
        "gen_ai.request.presence_penalty": float(sampling.presence_penalty),
        "gen_ai.request.stop_sequences": list(sampling.stop) or None,
        "gen_ai.request.seed": sampling.sampling_seed,
        "gen_ai.usage.input_tokens": len(generation.prompt_ids),
        "gen_ai.usage.output_tokens": len(generation.output_ids),
        "gen_ai.usage.cache_read.input_tokens": generation.cached_tokens,
        "gen_ai.latency.time_in_queue": generation.queue_time if finish is not None else None,
    }
    if generation.first_token_at is not None:
        found["gen_ai.latency.time_to_first_token"] = generation.first_token_at - generation.received_at
    if generation.finished_at is not None:
        found["gen_ai.latency.e2e"] = generation.finished_at - generation.received_at
    return {name: value for name, value in found.items() if value is not None}


def _error_of(generation: Generation) -> str | None:
    finish = generation.finish
    if finish is None:
        return "the client disconnected, or the engine stopped answering"
    return finish.get("message") or "aborted" if finish["type"] == "abort" else None


def _unix_ns(at: float) -> int:
    """Unix time in ns of a time on the monotonic clock."""
    return time.time_ns() - round((time.monotonic() - at) * 1e9)
