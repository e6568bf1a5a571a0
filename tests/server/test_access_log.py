"""The access log: uvicorn's lines, written together."""

from __future__ import annotations

import asyncio
import io
import logging
import random

import pytest
from uvicorn.logging import AccessFormatter as UvicornFormatter

from moe_engine import logs
from moe_engine.server.access_log import WRITE_SECONDS, AccessFormatter, AccessHandler

FORMAT = '[%(asctime)s] %(levelname)s:     %(client_addr)s - "%(request_line)s" %(status_code)s'


class CountingStream(io.StringIO):
    num_writes = 0

    def write(self, text: str) -> int:
        self.num_writes += 1
        return super().write(text)


def record(status: int) -> logging.LogRecord:
    path = random.choice(["/generate", "/v1/models?x=%20", "/é"])
    args = (f"127.0.0.1:{random.randrange(65536)}", random.choice(["GET", "POST"]), path, "1.1", status)
    return logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', args, None)


def handler_of(stream: io.StringIO) -> AccessHandler:
    handler = AccessHandler()
    handler.setStream(stream)
    handler.setFormatter(AccessFormatter())
    return handler


@pytest.mark.parametrize("status", [200, 404, 431, 499, 503])
def test_lines_are_uvicorns(status):
    theirs, ours = UvicornFormatter(FORMAT, logs.DATE_FORMAT, use_colors=False), AccessFormatter()
    for seconds in (0, 0, 1, 3600):
        line = record(status)
        line.created += seconds
        assert ours.format(line).rstrip() == theirs.format(line).rstrip()


def test_lines_of_a_moment_are_one_write():
    stream = CountingStream()
    handler = handler_of(stream)
    records = [record(200) for _ in range(random.randrange(2, 9))]

    async def serve() -> None:
        for line in records:
            handler.handle(line)
        assert stream.getvalue() == ""
        await asyncio.sleep(3 * WRITE_SECONDS)
        assert stream.getvalue().splitlines() == [AccessFormatter().format(line) for line in records]
        assert stream.num_writes == 1
        handler.handle(record(200))

    asyncio.run(serve())
    handler.flush()  # as `logging` does at exit
    assert len(stream.getvalue().splitlines()) == len(records) + 1


def test_outside_a_loop_a_line_is_written_at_once():
    stream = CountingStream()
    handler_of(stream).handle(record(200))
    assert stream.getvalue().endswith("200 OK\n")


def test_a_closed_stream_harms_nothing():
    stream = CountingStream()
    handler = handler_of(stream)
    stream.close()
    handler.handle(record(200))
    handler.flush()
