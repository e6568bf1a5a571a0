"""Clients that leave before their requests start: in the start queue, after a large body, while they are prepared,
while they wait."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import httpx
import pytest

from moe_engine.frontend.prepare import Preparer
from moe_engine.models.config_sections.pooling import PoolingConfig
from moe_engine.server import http_protocol
from tests.server.fake_engine import POOLING, FakeClient
from tests.server.harness import real_server
from tests.server.test_connections import connected, request
from tests.waiting import until


@pytest.mark.each_value
@pytest.mark.parametrize("size", [200, 100_000, 400_000])
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves_ends_its_waiting_request(size, in_parts, reset):
    """uvicorn reads no further after a body of more than 64 KiB, and would notice the end at the first token."""
    client = FakeClient()
    client.mute = True
    sent = request(json.dumps({"text": "x", "stream": True, "unknown": "x" * size}).encode())
    with real_server(client) as address, connected(address) as connection:
        if in_parts:
            connection.sendall(sent[:-100])
            httpx.get(address + "/health")  # the request has begun to read its body
            connection.sendall(sent[-100:])
        else:
            connection.sendall(sent)
        until(lambda: client.running)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
        until(lambda: not client.running, "the request still waits")
        assert len(client.closed_early) == 1


MESSAGES = [{"role": "user", "content": "hi"}]
CLASSES = PoolingConfig("last", False, width=2, head=True, labels=("no", "yes"))
SCORE = PoolingConfig("last", False, width=1, head=True, labels=("score",))


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("path", "body", "pooling"),
    [
        ("/generate", {"text": "x"}, None),
        ("/v1/completions", {"prompt": "x"}, None),
        ("/v1/chat/completions", {"messages": MESSAGES}, None),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}, None),
        ("/v1/responses", {"input": "x"}, None),
        ("/v1/responses", {"input": "x", "background": True}, None),
        ("/api/chat", {"messages": MESSAGES}, None),
        ("/api/generate", {"prompt": "x"}, None),
        ("/v1/score", {"query": "x", "items": ["y"], "label_token_ids": [5]}, None),
        ("/v1/embeddings", {"input": "x"}, POOLING),
        ("/encode", {"text": "x"}, POOLING),
        ("/v1/classify", {"input": "x"}, CLASSES),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}, SCORE),
    ],
)
def test_a_client_that_leaves_ends_the_preparation(path, body, pooling, monkeypatch):
    """Grammars and images take seconds there; the server waited for them before it stopped."""
    begun, ended = threading.Event(), threading.Event()

    async def begin(self: Preparer, *arguments: Any) -> Any:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    monkeypatch.setattr(Preparer, "begin", begin)
    sent = json.dumps({"model": "tiny", **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent)}\r\n\r\n".encode()
    with real_server(FakeClient(pooling=pooling)) as address, connected(address) as connection:
        connection.sendall(head + sent)
        until(begun.is_set, "the request is not prepared")
        connection.close()
        until(ended.is_set, "the preparation goes on")


def test_a_request_without_a_client_does_not_start(monkeypatch):
    held, started = [], []
    monkeypatch.setattr(http_protocol.StartQueue, "add", lambda queue, start: held.append(start))
    monkeypatch.setattr(
        http_protocol.HttpToolsProtocol, "_start_asgi_task", lambda connection, cycle, app: started.append(cycle)
    )

    def num_lost() -> int:
        return sum(start.args[1].disconnected for start in held)

    with real_server(FakeClient()) as address:
        connections = [connected(address) for _ in range(3)]
        for connection in connections:
            connection.sendall(request(b'{"text": "x"}'))
        until(lambda: len(held) == 3)
        for connection in connections[:2]:
            connection.close()
        until(lambda: num_lost() == 2)
        for start in held:
            start()
        connections[2].close()
    assert len(started) == 1


WHOLE = request(b'{"text": "x"}')
STREAM = request(b'{"text": "x", "stream": true, "sampling_params": {"max_new_tokens": 4}}')


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("sent", "cut"),
    [(WHOLE, 0), (STREAM, 0), (WHOLE, 3), (WHOLE, len(WHOLE) - 10)],
    ids=["whole", "stream", "within the body", "within the head"],
)
def test_a_client_that_closes_only_its_sending_side_reads_why(sent, cut):
    client = FakeClient()
    client.mute = True
    with real_server(client) as address, connected(address) as connection:
        connection.sendall(sent[: len(sent) - cut])
        if not cut:
            until(lambda: client.running)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while data := connection.recv(65536):
            received += data
        until(lambda: not client.running, "the request still runs")
    assert received.startswith(b"HTTP/1.1 400 ") and received.count(b"HTTP/1.1") == 1
    assert "keep it open until the response has come" in json.loads(received.partition(b"\r\n\r\n")[2])["message"]


def test_a_client_that_closes_its_sending_side_during_a_stream_gets_no_error_in_it():
    client = FakeClient()
    client.delay = 0.05
    body = b'{"text": "x", "stream": true, "sampling_params": {"max_new_tokens": 60}}'
    with real_server(client) as address, connected(address) as connection:
        connection.sendall(request(body))
        received = connection.recv(65536)
        connection.shutdown(socket.SHUT_WR)
        while data := connection.recv(65536):
            received += data
        until(lambda: not client.running, "the request still runs")
    assert received.startswith(b"HTTP/1.1 200") and b"keep it open" not in received
