"""Requests that arrive together start over several turns of the event loop."""

from __future__ import annotations

import asyncio
import itertools
import socket

import httpx
import pytest

from moe_engine.server import http_protocol
from moe_engine.server.start_queue import PER_TURN, StartQueue
from tests.server.fake_engine import FakeClient
from tests.server.harness import real_server


@pytest.mark.parametrize("count", [1, PER_TURN, PER_TURN + 1, 5 * PER_TURN])
async def test_a_burst_starts_in_order_over_several_turns(count):
    queue, started, turns = StartQueue(), [], []
    for number in range(count):
        queue.add(lambda number=number: started.append(number))
    turns.append(len(started))
    while len(started) < count:
        await asyncio.sleep(0)
        turns.append(len(started))
    assert started == list(range(count)) and not len(queue)
    assert turns[0] == min(count, PER_TURN)
    assert all(later - earlier <= PER_TURN for earlier, later in itertools.pairwise(turns))
    for number in range(2 * PER_TURN):  # the queue has no memory of the burst
        await asyncio.sleep(0)
        queue.add(lambda number=number: started.append(number))
        assert started[-1] == number


def test_a_probe_waits_for_no_burst(monkeypatch):
    """It waited for all prompts that had arrived before it: 0.5 CPU seconds behind 200 streams."""
    monkeypatch.setattr(http_protocol.StartQueue, "add", lambda queue, start: None)
    with real_server(FakeClient()) as address:
        assert httpx.get(address + "/health", timeout=20).status_code == 200


def test_a_burst_of_requests_is_answered(monkeypatch):
    """More requests at once than start in a turn; one client disconnects before its request starts."""
    most = []
    add = StartQueue.add

    def watched(queue, start):
        add(queue, start)
        most.append(len(queue))

    monkeypatch.setattr(http_protocol.StartQueue, "add", watched)
    client = FakeClient()

    async def main(address):
        host, port = address.removeprefix("http://").split(":")
        gone = socket.create_connection((host, int(port)))
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=address, limits=limits, timeout=60) as http:
            posts = [http.post("/v1/completions", json={"prompt": "x", "stream": True}) for _ in range(60)]
            gone.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 15\r\n\r\n" + b'{"prompt": "x"}')
            gone.close()
            return await asyncio.gather(*posts)

    with real_server(client) as address:
        answers = asyncio.run(main(address))
    assert {(answer.status_code, "[DONE]" in answer.text) for answer in answers} == {(200, True)}
    assert not client.running and len(most) >= 60
