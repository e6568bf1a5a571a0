"""The HTTP layer around a request: upgrade offers, encodings, methods, addresses, log lines of uvicorn."""

from __future__ import annotations

import ast
import asyncio
import gc
import gzip
import inspect
import json
import socket
import time
import tomllib
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from packaging.requirements import Requirement

from moe_engine.errors import ConfigError
from moe_engine.server import http_protocol
from moe_engine.server.listen import bind, url_host
from moe_engine.server.serve import http_config, serve
from tests.server.fake_engine import FakeClient
from tests.server.harness import TEXT, get, make_app, post, real_server, talk
from tests.waiting import until

UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"


def exchange(address: str, *parts: bytes) -> list[tuple[int, Any]]:
    """Sends the parts one by one on one connection; returns status and body of every answer until it closes."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            connection.sendall(part)
        received = b""
        while data := connection.recv(65536):
            received += data
    answers = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
        answers.append((int(head.split()[1]), json.loads(received[:length] or b"null")))
        received = received[length:]
    return answers


def request(body: bytes, headers: bytes = b"") -> bytes:
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body)
    return head + headers + b"\r\n" + body


BODY = json.dumps({"text": "hi"}).encode()
CLOSE = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
CHUNKED = (
    b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + UPGRADE + b"\r\n"
    b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (4, BODY[:4], len(BODY) - 4, BODY[4:])
)


@pytest.mark.parametrize(
    "parts",
    [
        (request(BODY, UPGRADE) + CLOSE,),
        (request(BODY, UPGRADE), CLOSE),
        (request(BODY, UPGRADE)[:-5], request(BODY, UPGRADE)[-5:], CLOSE),
        (request(BODY, UPGRADE)[:-5], request(BODY, UPGRADE)[-5:] + request(BODY, UPGRADE) + CLOSE),
        (CHUNKED + CLOSE,),
        tuple(bytes([byte]) for byte in request(BODY, UPGRADE) + CLOSE),
    ],
    ids=["one-segment", "next-request-apart", "body-cut", "twice", "chunked", "byte-by-byte"],
)
def test_upgrade_header_does_not_lose_the_body(parts):
    """Java's HttpClient and `curl --http2` send this offer with every first request."""
    with real_server(FakeClient()) as address:
        *generated, (health, _) = exchange(address, *parts)
    assert health == 200
    assert len(generated) == b"".join(parts).count(b"POST")
    assert all(status == 200 and answer["text"] == TEXT for status, answer in generated)


def test_a_base_url_that_ends_with_a_slash():
    with real_server(FakeClient()) as address:
        assert httpx.get(address + "//health").content == b""
        assert httpx.post(address + "//v1/completions?a=b", json={"prompt": "x"}).status_code == 200
        assert "/a//b: no such" in httpx.get(address + "///a//b").text


def test_http_1_0_answers_end_with_the_connection():
    body = json.dumps({"text": "hi", "stream": True, "sampling_params": {"max_new_tokens": 40}}).encode()
    whole = json.dumps({"text": "hi"}).encode()
    received = {}
    with real_server(FakeClient()) as address:
        host, port = address.removeprefix("http://").split(":")
        for sent in (body, whole):
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(request(sent).replace(b"HTTP/1.1", b"HTTP/1.0"))
                received[sent] = b""
                while data := connection.recv(65536):
                    received[sent] += data
    head, _, events = received[body].partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    *parts, end = events.removesuffix(b"\n\n").split(b"\n\n")
    assert end == b"data: [DONE]" and parts and all(json.loads(part.removeprefix(b"data: ")) for part in parts)
    head, _, answer = received[whole].partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(answer) in head and json.loads(answer)["text"]


def test_upgrade_header_without_a_body():
    with real_server(FakeClient()) as address:
        answers = exchange(address, b"GET /model_info HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"\r\n", CLOSE)
    assert [status for status, _ in answers] == [200, 200]


def test_private_attributes_of_uvicorn_exist():
    """This internal interface may change. pyproject.toml allows the tested versions; raise its bound after this
    file's tests."""
    with real_server(FakeClient()) as address, connected(address) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        (live,) = [made for made in gc.get_objects() if type(made) is http_protocol.Connection and made.transport]
        missing = {name for name in http_protocol.PRIVATE if not hasattr(live, name)}
        missing |= {name for name in http_protocol.CYCLE if not hasattr(live.cycle, name)}
        assert not missing and hasattr(live.cycle.flow, "write_paused"), (uvicorn.__version__, missing)
    wanted = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["dependencies"]
    (bound,) = [Requirement(text).specifier for text in wanted if text.startswith("uvicorn")]
    assert bound.contains(uvicorn.__version__) and not bound.contains("999")
    source = ast.parse(inspect.getsource(http_protocol.Connection))
    own = set(vars(http_protocol.Connection)) | {"connection_made", "connection_lost"}
    used = {
        node.attr
        for node in ast.walk(source)
        if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Call))
        and (getattr(node.value, "id", "") == "self" or getattr(getattr(node.value, "func", None), "id", "") == "super")
    }  # fmt: skip
    assert used - own <= http_protocol.PRIVATE


def connected(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def answer_to(address: str, *parts: bytes) -> bytes:
    """The bytes of the answer until the server closes the connection."""
    received = b""
    with connected(address) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            while data := connection.recv(65536):
                received += data
        except (BrokenPipeError, ConnectionResetError):
            pass
    return received


WHOLE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LONG_HEADER = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 70_000


@pytest.mark.parametrize(
    "parts",
    [
        (LONG_HEADER + b"\r\n\r\n",),
        (LONG_HEADER[:-30_000], LONG_HEADER[-30_000:], b"\r\n\r\n"),
        (LONG_HEADER, b"x" * 10_000_000),  # without an end
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Short: 1\r\n" * 10_000 + b"\r\n",),
    ],
    ids=["whole", "in-parts", "endless", "many"],
)
def test_large_heads_are_refused(parts):
    with real_server(FakeClient()) as address:
        answer = answer_to(address, *parts)
        if len(parts) != 2:  # the connection of a client that is still sending may be reset before the answer
            assert answer.startswith(b"HTTP/1.1 431") and b"65536 bytes" in answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 431
        near = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Long: " + b"x" * 60_000 + b"\r\n\r\n"
        assert answer_to(address, near).startswith(b"HTTP/1.1 200")


def test_connections_leave_files_for_the_rest_of_the_server(monkeypatch):
    """Without a free descriptor no child process starts, and the watchdog cannot look at the engine."""
    monkeypatch.setattr(http_protocol.open_files, "limit", lambda: http_protocol.open_files.RESERVED + 3)
    with real_server(FakeClient()) as address, ExitStack() as idle:
        for _ in range(3):
            last = idle.enter_context(connected(address))
        refused = answer_to(address)
        assert refused.startswith(b"HTTP/1.1 503 Service Unavailable") and b"retry-after: 1\r\n" in refused
        last.sendall(WHOLE)
        assert last.recv(4096).startswith(b"HTTP/1.1 200")
        idle.close()
        last_one = WHOLE.removesuffix(b"\r\n") + b"Connection: close\r\n\r\n"
        until(lambda: answer_to(address, last_one).startswith(b"HTTP/1.1 200"), "still refused")


@pytest.mark.parametrize("parts", [(), (b"GET /health HTTP/1.1\r\nHost: ",), (WHOLE, b"GET /he")])
def test_incomplete_heads_are_refused(monkeypatch, parts):
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.3)
    with real_server(FakeClient()) as address:
        answer = answer_to(address, *parts)
    assert answer.count(b"HTTP/1.1 408") == (1 if parts else 0)
    assert answer.count(b"HTTP/1.1 200") == (1 if len(parts) == 2 else 0)


def test_slow_response_is_not_a_slow_head(monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.2)
    client = FakeClient()
    client.delay = 0.1
    with real_server(client) as address:
        answers = exchange(address, request(BODY), CLOSE)
    assert [status for status, _ in answers] == [200, 200]


@pytest.mark.parametrize(("prefixes", "shown"), [((), 3), (("/health",), 1), (("/health", "/v1/mod"), 0)])
async def test_paths_left_out_of_the_access_log(capfd, prefixes, shown):
    sock, done = bind("127.0.0.1", 0), asyncio.Event()

    async def ready(host, port):
        await asyncio.to_thread(lambda: [httpx.get(f"http://{host}:{port}{p}") for p in PATHS])
        done.set()

    task = asyncio.create_task(serve(http_config(make_app(FakeClient()), quiet_paths=prefixes), sock, on_ready=ready))
    await done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert sum("HTTP/1.1" in line for line in capfd.readouterr().err.splitlines()) == shown


PATHS = ("/health", "/health?x=1", "/v1/models")


def test_compressed_bodies_are_refused_by_name():
    response = post(FakeClient(), "/generate", gzip.compress(BODY), headers={"content-encoding": "gzip"})
    assert response.status_code == 415
    assert "Content-Encoding 'gzip'" in response.json()["error"]["message"]
    assert post(FakeClient(), "/generate", BODY, headers={"content-encoding": "identity"}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/generate", "POST, PUT"),
        ("GET", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("PATCH", "/flush_cache", "GET, POST"),
        ("OPTIONS", "/v1/completions", "POST"),
    ],
)
def test_wrong_method_lists_the_allowed_ones(method, path, allowed):
    response = talk(FakeClient(), lambda http: http.request(method, path))
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    assert f"use {allowed}" in response.json()["error"]["message"]


def test_head_answers_where_get_only_reads():
    for path in ("/health", "/v1/models", "/model_info", "/server_info"):
        response = talk(FakeClient(), lambda http, path=path: http.head(path))
        assert response.status_code == 200
    assert talk(FakeClient(), lambda http: http.head("/flush_cache")).status_code == 405
    assert "head" not in str(get(FakeClient(), "/openapi.json").json()["paths"]["/v1/models"])


def test_addresses():
    for host in ("127.0.0.1", "localhost", ""):
        with bind(host, 0) as sock:
            assert sock.family == socket.AF_INET
    with pytest.raises(ConfigError, match=r"--host no\.such\.host\.invalid --port 0: no address of that name"):
        bind("no.such.host.invalid", 0)
    bind("[127.0.0.1]", 0).close()
    hosts = {"0.0.0.0": "localhost", "::": "localhost", "::1": "[::1]", "[::1]": "[::1]", "10.1.2.3": "10.1.2.3"}
    assert {host: url_host(host) for host in hosts} == hosts


def test_an_ipv6_address_serves():
    try:
        bind("::1", 0).close()
    except ConfigError as error:
        pytest.skip(f"this host has no IPv6: {error}")
    with real_server(FakeClient(), host="::1") as address:
        assert address.startswith("http://[::1]:")
        assert httpx.post(address + "/generate", json={"text": "x"}).json()["text"] == TEXT


CHUNKS = b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "kind", "words"),
    [
        (b"GET /health HTTP/9.9\r\n\r\n", "object", "Invalid HTTP version"),
        (b"\x16\x03\x01 this is no HTTP\r\n\r\n", "object", "a TLS handshake on a port without TLS: use http"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "object", "set the client or the proxy to HTTP/1.1"),
        (b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n", "object", "invalid url"),
        (b"POST /v1/completions HTTP/1.1\r\nHo st: x\r\n\r\n", "object", "Invalid header token"),
        (b"POST /v1/chat/completions" + CHUNKS + b"zz\r\n", "object", "Invalid character in chunk size"),
        (b"POST /v1/messages?beta=true" + CHUNKS + b"3\r\nabcdef\r\n", "type", "Expected LF after chunk data"),
        (b"POST /api/chat HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "error", "Duplicate Content-Le"),
    ],
)
def test_invalid_http_gets_the_error_object_of_its_path(sent, kind, words):
    with real_server(FakeClient()) as address:
        ((status, answer),) = exchange(address, sent)
    error = answer["error"]
    assert (status, next(iter(answer))) == (400, kind)
    assert words in (error if isinstance(error, str) else error["message"])


def test_invalid_http_behind_a_request_writes_nothing_into_its_response():
    client = FakeClient()
    client.delay = 0.05
    body = json.dumps({"text": "hi", "stream": True, "sampling_params": {"max_new_tokens": 40}}).encode()
    with real_server(client) as address, connected(address) as connection:
        connection.sendall(request(body))
        received = connection.recv(65536)
        connection.sendall(b"no HTTP\r\n\r\n")
        with suppress(ConnectionError):
            while data := connection.recv(65536):
                received += data
        assert received.startswith(b"HTTP/1.1 200") and received.count(b"HTTP/1.1") == 1
        until(lambda: not client.running)
        assert len(client.closed_early) == 1


def test_uvicorn_logs_in_the_format_of_all_lines(capfd):
    with real_server(FakeClient()) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 400")
    lines = [line for line in capfd.readouterr().err.splitlines() if "Invalid HTTP request" in line]
    assert lines and all(line.startswith("[20") for line in lines)


LONG_NAME = "x" * 50_000_000
"""A response with it is larger than what sockets hold."""


@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_reads_nothing_is_disconnected(monkeypatch, capfd, reads):
    monkeypatch.setattr(http_protocol, "UNREAD_SECONDS", 0.3)
    with real_server(FakeClient(served_model_name=LONG_NAME)) as address, connected(address) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        if not reads:
            words = "read nothing of its response for 0.3 s: disconnected"
            until(lambda: words in capfd.readouterr().err)
        received = 0
        with suppress(ConnectionError):
            while data := connection.recv(1 << 20):
                received += len(data)
                if reads:
                    time.sleep(0.01)  # longer than the limit in all
        assert (received > len(LONG_NAME)) == reads
