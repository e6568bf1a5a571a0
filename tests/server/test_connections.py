"""What stands around a request: offers to upgrade, encodings, methods, addresses, the lines uvicorn logs."""

from __future__ import annotations

import gzip
import json
import socket
from typing import Any

import pytest

from moe_engine.errors import ConfigError
from moe_engine.server.listen import bind, url_host
from tests.server.fake_engine import FakeClient
from tests.server.harness import TEXT, get, post, real_server, talk

UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"


def exchange(address: str, *parts: bytes) -> list[tuple[int, Any]]:
    """Sends the parts one by one on one connection; returns status and body of every answer until it closes."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
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
def test_an_offer_to_upgrade_does_not_cost_the_body(parts):
    """Java's HttpClient and `curl --http2` make that offer with every first request."""
    with real_server(FakeClient()) as address:
        *generated, (health, _) = exchange(address, *parts)
    assert health == 200
    assert len(generated) == b"".join(parts).count(b"POST")
    assert all(status == 200 and answer["text"] == TEXT for status, answer in generated)


def test_an_offer_without_a_body():
    with real_server(FakeClient()) as address:
        answers = exchange(address, b"GET /model_info HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"\r\n", CLOSE)
    assert [status for status, _ in answers] == [200, 200]


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
def test_other_methods_are_told_which_ones_there_are(method, path, allowed):
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
    assert [url_host(host) for host in ("0.0.0.0", "::", "::1", "10.1.2.3")] == [
        "localhost",
        "localhost",
        "[::1]",
        "10.1.2.3",
    ]


def test_uvicorn_logs_in_the_format_of_all_lines(capfd):
    with real_server(FakeClient()) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 400")
    lines = [line for line in capfd.readouterr().err.splitlines() if "Invalid HTTP request" in line]
    assert lines and all(line.startswith("[20") for line in lines)
