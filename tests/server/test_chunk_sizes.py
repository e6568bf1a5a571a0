"""Chunked bodies: sizes that chunk headers declare, and the refusal of a body that declares too much."""

from __future__ import annotations

import random

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.server.chunk_sizes import HEADER_BYTES, ChunkSizes
from tests.examples import examples
from tests.server.fake_engine import FakeClient
from tests.server.harness import real_server
from tests.server.test_connections import CLOSE, UPGRADE, connected, exchange

HEAD = b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
EXTENSIONS = st.sampled_from([b"", b"", b";a=b", b';long="' + b"x" * (2 * HEADER_BYTES) + b'"'])


class Body:
    """Callbacks of httptools: the oracle."""

    def __init__(self) -> None:
        self.data, self.is_complete = b"", False

    def on_body(self, data: bytes) -> None:
        self.data += data

    def on_message_complete(self) -> None:
        self.is_complete = True


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=40), EXTENSIONS, st.integers(0, 3)), max_size=6),
    st.integers(0, 2**32),
)
@settings(max_examples=examples(40))
def test_declared_sizes_are_those_of_the_body(chunks, seed):
    rng = random.Random(seed)
    wire = b"".join(
        b"0" * zeros + b"%x" % len(data) + extension + b"\r\n" + data + b"\r\n" for data, extension, zeros in chunks
    )
    wire += b"0\r\n\r\n"
    body, sizes = Body(), ChunkSizes()
    parser = httptools.HttpRequestParser(body)
    parser.feed_data(HEAD % b"/" + b"\r\n")
    at = 0
    while at < len(wire):
        part = wire[at : at + rng.choice([1, 2, 7, 50])]
        at += len(part)
        parser.feed_data(part)
        sizes.feed(part)
        assert sizes.declared >= len(body.data)
    assert body.is_complete and sizes.has_ended
    assert sizes.declared == len(body.data) == sum(len(data) for data, _, _ in chunks)


@pytest.mark.parametrize(
    "rest", [b"", b"5", b"5;" + b"x" * 100, b"1" * 17 + b"\r\n", b"zz\r\n", b"0000000000000000000005\r\nabcde"]
)
def test_a_header_that_is_not_read_declares_nothing(rest):
    sizes = ChunkSizes()
    for byte in rest:
        sizes.feed(bytes([byte]))
    assert sizes.declared == 0


def in_pieces(data: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in data]


@pytest.mark.each_value
@pytest.mark.parametrize("path", [b"/generate", b"/abort_request", b"/tokenize"])
@pytest.mark.parametrize("parts", [
    lambda head: [head + b"1000000000000\r\n"],
    lambda head: [head, b"1000000000000\r\n{"],
    lambda head: in_pieces(head + b"1000000000000\r\n"),
    lambda head: [head[:-1], head[-1:] + b"2\r\n{}\r\n1000000000000;a=b\r\n"],
    lambda head: [head + b"2\r\n{}\r\n", b"1000", b"000000000\r\n"],
    lambda head: [CLOSE.replace(b"Connection: close\r\n", b"") + head + b"1000000000000\r\n"],
], ids=["one-segment", "apart", "byte-by-byte", "second-chunk", "cut-header", "pipelined"])  # fmt: skip
@pytest.mark.parametrize("headers", [b"", UPGRADE])
def test_a_chunk_that_is_too_large_is_refused_before_it_arrives(path, parts, headers, request):
    head = HEAD % path + headers + b"\r\n"
    with real_server(FakeClient()) as address, connected(address) as connection:
        for part in parts(head):
            connection.sendall(part)
        answer = b""
        wanted = 2 if "pipelined" in request.node.name else 1
        while answer.count(b"HTTP/1.1") < wanted or b"413" not in answer:
            data = connection.recv(65536)  # raises if there is none in time
            assert data, answer
            answer += data
    assert answer.rpartition(b"HTTP/1.1 ")[2].startswith(b"413")


def test_chunks_below_the_limit_pass():
    body = b'{"text": "hi"}'
    sent = HEAD % b"/generate" + b"\r\n" + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    with real_server(FakeClient()) as address:
        for parts in ((sent + sent + CLOSE,), tuple(in_pieces(sent + sent)) + (CLOSE,)):
            assert [status for status, _ in exchange(address, *parts)] == [200, 200, 200]
