"""The clients of `benchmarks.many_streams`, against the HTTP application over a fake engine."""

from __future__ import annotations

import json
import multiprocessing
import random
import threading

import pytest

from benchmarks import many_streams
from benchmarks.stream_clients import ReadStream, read_streams
from benchmarks.structured_output import gaps
from tests.server.fake_engine import FakeClient
from tests.server.harness import real_server


@pytest.mark.parametrize("slow", [False, True])
def test_every_stream_is_counted(slow):
    client = FakeClient(max_total_num_tokens=100_000, context_len=4096, max_req_input_len=4000)
    client.script = lambda _: [7, 8, 9]
    prompts = many_streams.prompts(random.Random(random.getrandbits(64)), 20)
    prompts = [[token % client.info.vocab_size for token in prompt] for prompt in prompts]
    with real_server(client) as address:
        port = int(address.rpartition(":")[2])
        requests = [many_streams.request_bytes(port, prompt, 12) for prompt in prompts]
        slowly = many_streams.request_bytes(port, prompts[0], 900) if slow else None
        seconds, streams = read_streams(port, requests, slowly)
    assert [stream.num_tokens for stream in streams] == [12] * 20
    for stream in streams:
        assert len(stream.gaps) == len(stream.moments) - 1 and all(gap >= 0 for gap in stream.gaps)
        assert stream.moments[-1] <= seconds and len(stream.moments) <= stream.num_events <= 12 + 2


def test_a_request_beside_running_streams():
    """The sender of `benchmarks.structured_output.gaps` answers once its request has its answer."""
    client, called = FakeClient(max_total_num_tokens=100_000, context_len=4096, max_req_input_len=4000), list[str]()
    with real_server(client) as address:
        port = int(address.rpartition(":")[2])
        ours, theirs = multiprocessing.Pipe()
        sender = threading.Thread(target=gaps.send_requests, args=(theirs,))
        sender.start()

        def arrive() -> None:
            called.append("arrived")
            ours.send_bytes(b"now")

        streams = [many_streams.request_bytes(port, [1, 2, 3], 30) for _ in range(3)]
        ours.send_bytes(gaps.request_bytes(port, "/v1/chat/completions", gaps.arriving(None)))
        _, read = read_streams(port, streams, when_running=arrive, running_events=5)
        assert json.loads(ours.recv_bytes()) > 0
        ours.close()
        sender.join(10)
    assert called == ["arrived"] and all(stream.num_tokens == 30 for stream in read) and not sender.is_alive()
    assert len(client.requests) == 4


def test_events_split_between_reads_and_cut_streams():
    stream = ReadStream()
    data = b'data: {"a":1}\n\n' * 3 + b'data: {"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n'
    for at in range(0, len(data), 16):
        stream.add(data[at : at + 16], at / 16)
    assert stream.num_tokens == 3 and 4 <= stream.num_events <= 5
    cut = ReadStream()
    cut.add(data[:-16], 0.0)
    assert cut.num_tokens == 0


def test_gaps_of_the_ramp_are_not_steady():
    early, late = ReadStream(), ReadStream()
    early.moments = [0.0, 5.0, 6.0, 7.0, 8.0]
    late.moments = [5.5, 6.5, 7.5]
    assert many_streams.steady_ratio([early, late]) == 1.0
