"""Pieces written on arrival (`frontend.sequence.PieceSink`): the same answers as through the request's task."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import time

import httpx
import pytest

from moe_engine.core.messages import AddRequest, RequestDelta
from moe_engine.errors import EngineDeadError
from moe_engine.frontend.dp_routing import Load
from moe_engine.frontend.frontend import Frontend
from moe_engine.frontend.generate_input import GenerateInput
from moe_engine.frontend.inbox import Inbox
from moe_engine.tokenizer.tool_calls.named import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from tests.server.fake_engine import FakeClient
from tests.server.harness import CHAT, TEXT, post, real_server
from tests.waiting import until

TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
CALL = f'think</think>{CALLS_BEGIN}{CALL_BEGIN}get_weather{SEPARATOR}{{"city": "Paris"}}{CALL_END}{CALLS_END}'
PARSERS = {"tool_call_parser": "deepseekv3", "reasoning_parser": "deepseek-r1"}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
VARYING = re.compile(
    rb'"(id|created|created_at|item_id|call_id|e2e_latency|[a-z_]*(time|latency|ts|throughput|duration))":[^,}]+'
)


class CountingClient(FakeClient):
    """Counts the deltas accepted by sinks."""

    num_direct = 0

    async def stream(self, request, direct=None):
        def counted(delta):
            taken = direct(delta)
            self.num_direct += taken
            return taken

        async for delta in super().stream(request, counted if direct is not None else None):
            yield delta


def plain(data: bytes) -> bytes:
    return VARYING.sub(b"", re.sub(rb"(msg|rs|fc|resp|call|toolu|cmpl|chatcmpl)_?-?[0-9a-f]{8,}\w*", b"", data))


@pytest.mark.parametrize(
    ("path", "body", "text", "settings"),
    [
        ("/generate", {"text": "x"}, TEXT, {}),
        ("/generate", {"text": "x", "sampling_params": {"stop": "how"}}, TEXT, {}),
        ("/generate", {"text": "x", "sampling_params": {"stop_regex": "h[aeiou]w", "stop": "howl"}}, TEXT, {}),
        ("/generate", {"text": "x"}, "🙂é a", {"incremental_streaming_output": True}),
        ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}, 'a "quoted"\n\\ 🙂é', {}),
        ("/v1/completions", {"prompt": "x", "echo": True, "stop": ["how"], **USAGE}, TEXT, {}),
        ("/v1/completions", {"prompt": "x", "return_token_ids": True}, "🙂é a", {}),
        ("/v1/chat/completions", CHAT, "🙂é\u2028 a", {}),
        ("/v1/chat/completions", {**CHAT, "return_token_ids": True}, "🙂é a", {}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, **USAGE}, TEXT, {}),
        ("/v1/chat/completions", {**CHAT, "tools": TOOLS}, CALL, PARSERS),
        ("/v1/messages", {**CHAT, "max_tokens": 99}, CALL, PARSERS),
        ("/v1/responses", {"input": "x"}, CALL, PARSERS),
        ("/api/chat", CHAT, CALL, PARSERS),
        ("/api/generate", {"prompt": "x"}, 'a "quoted"\n\\ 🙂é', {}),
    ],
)
def test_streams_are_the_same_with_a_lane(path, body, text, settings):
    """An in-process client has no connection to write to, so the first answer uses the task."""
    clients = CountingClient(text), CountingClient(text)
    expected = post(clients[0], path, {**body, "stream": True}, **settings)
    with real_server(clients[1], **settings) as address:
        response = httpx.post(address + path, json={**body, "stream": True})
    assert response.status_code == 200 and plain(response.content) == plain(expected.content)
    assert not clients[0].num_direct
    assert (clients[1].num_direct > 1) == ("logprobs" not in body)
    assert not clients[1].running


def test_an_error_after_tokens_in_the_lane_ends_the_stream():
    client = CountingClient()
    client.fail_after = 4
    with real_server(client) as address:
        response = httpx.post(address + "/v1/completions", json={"prompt": "x", "stream": True})
    assert client.num_direct == 3
    assert response.content.endswith(b"data: [DONE]\n\n") and b"killed by SIGKILL" in response.content


def test_a_parser_that_fails_in_the_lane_ends_the_stream_and_the_request(monkeypatch):
    pushed = []

    def broken(self, text):
        pushed.append(text)
        if len(pushed) == 4:
            raise ValueError("broken parser")
        return [{"content": text}]

    monkeypatch.setattr("moe_engine.server.openai.choice.ChoiceParser.push", broken)
    client = CountingClient()
    with real_server(client, **PARSERS) as address:
        response = httpx.post(address + "/v1/chat/completions", json={**CHAT, "stream": True})
    assert client.num_direct == 2  # the first piece contains the head, the fourth fails
    assert b"broken parser" in response.content and response.content.endswith(b"data: [DONE]\n\n")
    until(lambda: not client.running)
    assert len(client.closed_early) == 1


def test_a_client_that_does_not_read_loses_nothing():
    """The sink closes when the connection's buffer is full: tokens merge, and all of them arrive later."""
    client = CountingClient("word " * 400)
    client.per_step = 20
    body = b'{"text": "x", "stream": true, "sampling_params": {"max_new_tokens": 200, "ignore_eos": true}}'
    head = b"POST /generate HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    client.script = lambda _: [7] * 100
    with real_server(client) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect((host, int(port)))
            connection.sendall(head % len(body) + body)
            time.sleep(0.2)
            received = b""
            while data := connection.recv(4096):
                received += data
    assert b'"completion_tokens":200' in received and b"data: [DONE]" in received


class _SometimesReady:
    """A sink, and a reader of the remaining pieces, which keep their order."""

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws
        self.seen: list[int] = []
        self.num_put = 0

    def ready(self) -> bool:
        return self._draws.random() < 0.7

    def put(self, piece) -> None:
        self.num_put += 1
        self.seen += piece.token_ids

    def text_writer(self, generation):
        return None


@pytest.mark.parametrize("seed", range(5))
async def test_pieces_of_lane_and_task_are_in_order(seed):
    draws = random.Random(seed)
    client = FakeClient("one two three four five six seven eight nine ten eleven twelve thirteen")
    client.per_step = draws.choice([1, 2])
    sink = _SometimesReady(draws)
    frontend = Frontend(client, client.tokenizer)
    job = await frontend.prepare(GenerateInput(text="x", stream=True))
    async for piece in frontend.pieces(job, sink):
        sink.seen += piece.token_ids
    generation = job.generations[0]
    assert sink.seen == generation.output_ids == client.script(client.requests[0])
    assert sink.num_put > 0


async def test_an_inbox_offers_only_plain_deltas_that_its_reader_waits_for():
    request = AddRequest("r", [1], {}, 9, 0)
    offered, takes = [], True

    def direct(delta):
        offered.append(list(delta.token_ids))
        return takes

    inbox = Inbox(request, 0, Load(), direct)
    inbox.take(RequestDelta("r", [1]))  # no piece waits so far
    assert (await inbox.get()).token_ids == [1] and not offered
    reader = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    inbox.take(RequestDelta("r", [2]))
    inbox.take(RequestDelta("r", [3]))
    await asyncio.sleep(0)
    assert offered == [[2], [3]] and not reader.done()
    takes = False
    inbox.take(RequestDelta("r", [4]))
    takes = True
    inbox.take(RequestDelta("r", [5]))  # after a queued piece
    assert (await reader).token_ids == [4, 5] and offered == [[2], [3], [4]]
    reader = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    inbox.take(RequestDelta("r", [6], {"type": "length", "length": 6}))
    assert (await reader).finish and offered[-1] == [4]
    assert inbox.generated_ids == [1, 2, 3, 4, 5, 6] and inbox.ended
    inbox.fail(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError, match="gone"):
        await inbox.get()
