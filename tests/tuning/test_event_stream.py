"""The client of event streams against canned answers, for any split of the bytes."""

import asyncio
import json
import random
import time

import pytest

from moe_engine.tuning.event_stream import AnswerError, answer, events
from tests.benchmarks.canned_server import CannedServer

TEXTS = [{"text": "".join(random.choices("ab \n\u00e9\u6f22", k=random.randrange(40)))} for _ in range(20)]
STREAM = b": a comment\n\n" + b"".join(b"data: " + json.dumps(text).encode() + b"\n\n" for text in TEXTS)


async def read(server: CannedServer) -> list[tuple[float, bytes]]:
    async with server:
        return [event async for event in events(server.url + "/generate?x=1", {"stream": True}, {"X-Key": "k"})]


@pytest.mark.parametrize("chunk", [0, 1, 2, 7, 64, 4096])
@pytest.mark.parametrize("end", [b"", b"data: [DONE]\n\n", b"data: [DONE]\n\ndata: {}\n\n"])
def test_events(chunk, end):
    server = CannedServer(STREAM + end, chunk=chunk)
    before = time.perf_counter()
    found = asyncio.run(read(server))
    assert [json.loads(data) for _, data in found] == TEXTS
    moments = [moment for moment, _ in found]
    assert moments == sorted(moments) and before < moments[0] and moments[-1] < time.perf_counter()
    assert server.seen == [("/generate?x=1", {"stream": True})]
    assert b"x-key: k\r\n" in server.headers[0].lower() and b"connection: close\r\n" in server.headers[0].lower()


@pytest.mark.parametrize("chunk", [0, 3])
def test_refusals_carry_the_answer(chunk):
    with pytest.raises(AnswerError, match="HTTP 429: too many"):
        asyncio.run(read(CannedServer(b"too many\nrequests", 429, chunk=chunk)))


def test_an_answer_that_breaks_off():
    whole = 60 + len(STREAM)
    for cut in (0, 20, random.randrange(60, whole - 20)):
        with pytest.raises(AnswerError, match="broke off"):
            asyncio.run(read(CannedServer(STREAM, cut=cut, chunk=5)))


def test_what_is_no_http():
    async def run():
        async def speak(reader, writer):
            await reader.read(10)
            writer.write(b"hello\r\n\r\n")

        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return [event async for event in events(f"http://127.0.0.1:{port}/", {})]

    with pytest.raises(AnswerError, match="not an HTTP answer"):
        asyncio.run(run())


def test_whole_answers():
    async def run(server):
        async with server:
            return await answer(server.url + "/v1/x", [1])

    body = json.dumps(TEXTS).encode()
    for chunk in (0, 11):
        assert asyncio.run(run(CannedServer(body, chunk=chunk))) == body
    with pytest.raises(AnswerError, match="HTTP 500"):
        asyncio.run(run(CannedServer(b"no", 500)))
    with pytest.raises(OSError):
        asyncio.run(answer("http://127.0.0.1:9/", {}))
