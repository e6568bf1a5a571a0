"""Clients that leave before their requests start: in the start queue, after a large body, while they wait."""

from __future__ import annotations

import json
import socket

import httpx
import pytest

from moe_engine.server import http_protocol
from tests.server.fake_engine import FakeClient
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
