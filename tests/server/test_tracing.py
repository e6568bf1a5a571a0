"""Traces received by a collector over OTLP/HTTP, decoded with the protocol's messages."""

from __future__ import annotations

import asyncio
import gzip
import secrets
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.planning.flags import validate, validate_server
from moe_engine.server.trace_context import request_trace
from tests.server.fake_engine import FakeClient
from tests.server.harness import CHAT, make_app

WHY = "needs OpenTelemetry's SDK: pip install -e '.[trace]'"


class Collector:
    """An OTLP/HTTP receiver on a free port; `spans`: name, times, attributes of each span, with its ids."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, bytes]] = []
        collector = self

        class Receiver(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.bodies.append((self.path, body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Receiver)
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert {path for path, _ in self.bodies} == {"/v1/traces"}
        requests = [ExportTraceServiceRequest.FromString(body) for _, body in self.bodies]
        parts = [part for request in requests for part in request.resource_spans]
        for part in parts:
            assert _attributes(part.resource)["service.name"] == "moe-engine"
        return [span for part in parts for scope in part.scope_spans for span in scope.spans]


def _attributes(span: Any) -> dict[str, Any]:
    found = {}
    for item in span.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        found[item.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk.trace", reason=WHY)
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=WHY)
    found = Collector()
    yield found
    found.close()


def traced(collector: Collector, client: FakeClient, path: str, body: Any, headers: Any = None) -> httpx.Response:
    async def main() -> httpx.Response:
        app = make_app(client, enable_trace=True, otlp_traces_endpoint=collector.address, enable_metrics=True)
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
                await http.get("/health")
                response = await http.post(path, json=body, headers=headers)
        finally:
            app.state.server.bodies.close()
            await asyncio.to_thread(app.state.tracing.close)
        return response

    return asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_request_is_one_trace_below_the_clients_span(collector: Collector, stream: bool):
    parent, outer = secrets.token_bytes(16), secrets.token_bytes(8)
    headers = {"traceparent": f"00-{parent.hex()}-{outer.hex()}-01", "tracestate": "vendor=1"}
    body = CHAT | {"stream": stream, "temperature": 0.5, "max_tokens": 7, "stop": ["zebra"], "seed": 11}
    response = traced(collector, FakeClient(), "/v1/chat/completions", body, headers)
    assert response.status_code == 200
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"POST /v1/chat/completions", "tokenize", "chat tiny", "queue", "prefill", "decode"}
    assert {span.trace_id for span in spans.values()} == {parent}
    http, sequence = spans["POST /v1/chat/completions"], spans["chat tiny"]
    assert (http.parent_span_id, http.trace_state, http.kind) == (outer, "vendor=1", http.SPAN_KIND_SERVER)
    assert {spans["tokenize"].parent_span_id, sequence.parent_span_id} == {http.span_id}
    phases = [spans[name] for name in ("queue", "prefill", "decode")]
    assert {span.parent_span_id for span in phases} == {sequence.span_id}
    # the phases cover the sequence without gaps; times of two clocks agree within 1 ms
    edges = [sequence.start_time_unix_nano, *(span.end_time_unix_nano for span in phases)]
    for span, edge in zip(phases, edges, strict=False):
        assert abs(span.start_time_unix_nano - edge) < 1e6
    assert abs(edges[-1] - sequence.end_time_unix_nano) < 1e6
    found = _attributes(sequence)
    rid = None if stream else response.json()["id"]
    assert rid in (None, found["gen_ai.response.id"])
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "tiny", "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.request.temperature": 0.5, "gen_ai.request.max_tokens": 7, "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 2, "gen_ai.request.stop_sequences": ["zebra"],
        "gen_ai.request.seed": 11, "gen_ai.latency.time_in_queue": 0.25,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert found["gen_ai.usage.input_tokens"] > 2
    status = {"http.route": "/v1/chat/completions", "http.response.status_code": 200}
    assert {name: _attributes(http)[name] for name in status} == status


def test_several_sequences_and_errors(collector: Collector):
    several = {"text": ["a", "b"], "sampling_params": {"n": 2, "max_new_tokens": 2}}
    assert traced(collector, FakeClient(), "/generate", several).status_code == 200
    names = sorted(span.name for span in collector.spans)
    assert names == sorted(["POST /generate", "tokenize", *4 * ["text_completion tiny", "queue", "prefill", "decode"]])
    collector.bodies.clear()
    dying = FakeClient()
    dying.fail_after = 2
    failed = traced(collector, dying, "/generate", {"text": "a"})
    assert failed.status_code >= 500
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"POST /generate", "tokenize", "text_completion tiny", "decode"}
    for name in ("POST /generate", "text_completion tiny"):
        assert spans[name].status.code == spans[name].status.STATUS_CODE_ERROR
    collector.bodies.clear()
    assert traced(collector, FakeClient(), "/generate", {"text": 5}).status_code == 400
    (refused,) = collector.spans
    assert _attributes(refused)["http.response.status_code"] == 400
    assert refused.status.code != refused.status.STATUS_CODE_ERROR  # an error of the client


def test_an_unsampled_parent_is_respected(collector: Collector):
    headers = {"traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"}
    assert traced(collector, FakeClient(), "/v1/chat/completions", CHAT, headers).status_code == 200
    assert collector.bodies == []


def test_without_the_flag_nothing_is_traced():
    app = make_app(FakeClient())
    names = {item.cls.__name__ for item in app.user_middleware}  # type: ignore[attr-defined]
    assert app.state.tracing is None and "TraceRequests" not in names and request_trace.get() is None
    assert not app.state.server.frontend.observers
    app.state.server.bodies.close()


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("localhost:4317", "gRPC"), ("grpc://c:4318", "HOST:PORT"), ("http://", "HOST:PORT"), ("", "HOST:PORT"),
        ("http://c:4318/v1/traces", None), ("c:4318", None), ("https://c/otlp", None),
    ],
)  # fmt: skip
def test_endpoints(monkeypatch: pytest.MonkeyPatch, endpoint: str, words: str | None):
    monkeypatch.setattr(validate_server, "find_spec", lambda name: object())
    args = EngineArgs.from_kwargs(enable_trace=True, otlp_traces_endpoint=endpoint)
    if words is None:
        validate.check(args)
        return
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint.*" + words):
        validate.check(args)


def test_without_the_extra_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(validate_server, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--enable-trace.*pip install -e '\.\[trace\]'"):
        validate.check(EngineArgs.from_kwargs(enable_trace=True))


def test_urls_of_endpoints():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=WHY)
    from moe_engine.server.tracing import otlp_exporter

    for given, url in (
        ("c:4318", "http://c:4318/v1/traces"), ("https://c", "https://c/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"), ("http://c:4318/otlp/v1/traces", "http://c:4318/otlp/v1/traces"),
    ):  # fmt: skip
        exporter = otlp_exporter(given)
        assert exporter._endpoint == url
        exporter.shutdown()
