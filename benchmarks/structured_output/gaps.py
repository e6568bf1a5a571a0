"""Gaps of running streams while a request with a large grammar arrives at a server.

The client of the arriving request is in another process than the reader of the streams, and its body is made before:
the 120 KB of a schema otherwise occupy the thread that takes the times. Until 2026-11-27 both were one process, which
also was the frontend of an offline engine, and all gaps of the streams counted: most of the largest ones were pauses
of the machine, long after the arrival.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.server_process import ServerProcess
from benchmarks.stream_clients import ReadStream, read_streams
from moe_engine.tuning.stats import median, percentile

ENUM_SIZE = 5_000
NEIGHBORS = 4
NEIGHBOR_TOKENS = 400
COUNTED_SECONDS = 0.1
"""Gaps count that end within this time after the arrival; all kinds of requests are answered within it."""
FIELDS = 40
"""Fields of the object that a usual schema describes: about 3 KB."""
KINDS = ("free", "free again", "free large", "cached enum", "new enum", "cached object", "new object")
"""Arriving requests: two kinds without a constraint, whose difference is the noise; one without a constraint whose
body is as large as that of an enum; an enum that the server has compiled, and a new one; likewise an object of
`FIELDS`."""
COMPARED = (
    ("free", "free again"), ("free", "free large"), ("free large", "cached enum"), ("free large", "new enum"),
    ("cached enum", "new enum"), ("free", "cached object"), ("free", "new object"), ("cached object", "new object"),
)  # fmt: skip
"""Kinds and those that they are compared with: without a constraint and a body of the same size; cached."""


def measure_gaps(flags: list[str], rounds: int) -> dict[str, Any]:
    """The largest gap of four free streams after a request of each kind arrives, in random order within a round.

    `ratio`: by pair of `COMPARED`, within a round; for "free", to the mean of the two small kinds without a constraint.
    """
    rng = random.Random(3)
    numbers = itertools.count()
    kept = {"cached enum": {"enum": _enum(next(numbers))}, "cached object": _object(next(numbers))}
    largest: dict[str, list[float]] = {name: [] for name in KINDS}
    seconds: dict[str, list[float]] = {name: [] for name in KINDS}
    with ServerProcess(flags) as server, _other_process() as sender:
        server.wait_ready()
        streams = [request_bytes(server.port, "/v1/completions", _neighbor(rng)) for _ in range(NEIGHBORS)]
        for number in range(rounds + 1):
            for name in rng.sample(KINDS, len(KINDS)):
                schema = _schema(name, next(numbers), kept)
                body = arriving(schema)
                if name == "free large":
                    body["metadata"] = {"unused": _enum(next(numbers))}
                sender.send_bytes(request_bytes(server.port, "/v1/chat/completions", body))
                sent: list[float] = []
                total, read = read_streams(server.port, streams, when_running=partial(_send, sender, sent))
                arrived = sent[0] - (time.perf_counter() - total)
                took = json.loads(sender.recv_bytes())
                if number:  # the first round starts the process that checks grammars
                    largest[name].append(max(_largest_gap(stream, arrived) for stream in read))
                    seconds[name].append(took)
    bases = dict(largest)
    bases["free"] = [(one + other) / 2 for one, other in zip(largest["free"], largest["free again"])]
    return {
        "largest_s": {name: median(values) for name, values in largest.items()},
        "worst_s": {name: percentile(values, 100) for name, values in largest.items()},
        "request_s": {name: median(values) for name, values in seconds.items()},
        "ratio": {
            f"{base} -> {name}": median([one / other for one, other in zip(largest[name], bases[base])])
            for base, name in COMPARED
        },
        "enum_size": ENUM_SIZE,
    }


def _send(sender: Connection, sent: list[float]) -> None:
    sent.append(time.perf_counter())
    sender.send_bytes(b"now")


def _largest_gap(stream: ReadStream, arrived: float) -> float:
    moments = stream.moments
    return max(b - a for a, b in pairwise(moments) if arrived < b < arrived + COUNTED_SECONDS)


def _schema(kind: str, number: int, kept: dict[str, Any]) -> dict[str, Any] | None:
    match kind:
        case "cached enum" | "cached object":
            return kept[kind]
        case "new enum":
            return {"enum": _enum(number)}
        case "new object":
            return _object(number)
    return None


def _object(number: int) -> dict[str, Any]:
    """An object with fields of several types, all required, whose names no other number has."""
    words = random.Random(number)
    types: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 80},
        {"type": "integer", "minimum": 0},
        {"type": "array", "items": {"type": "number"}, "maxItems": 8},
        {"enum": ["low", "medium", "high"]},
    ]
    fields = {f"field_{i}_{words.getrandbits(32):x}": types[i % len(types)] for i in range(FIELDS)}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def _enum(number: int) -> list[str]:
    words = random.Random(number)
    return [f"{i}-{words.getrandbits(64):x}" for i in range(ENUM_SIZE)]


def _neighbor(rng: random.Random) -> dict[str, Any]:
    prompt = rng.choices(range(300, 1200), k=16)
    return {"model": "default", "prompt": prompt, "max_tokens": NEIGHBOR_TOKENS, "temperature": 1, "stream": True,
            "ignore_eos": True}  # fmt: skip


def arriving(schema: dict[str, Any] | None) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "Data: "}], "max_tokens": 1}
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "data", "schema": schema}}
    return body


def request_bytes(port: int, path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data


@contextmanager
def _other_process() -> Iterator[Connection]:
    """A process that gets a request, sends it when it gets any further message, and answers the seconds it took."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=send_requests, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join()


def send_requests(commands: Connection) -> None:
    """Gets a request, sends it when any further message comes, and reports the seconds until its answer; repeatedly."""
    while True:
        try:
            request = commands.recv_bytes()
            commands.recv_bytes()
        except EOFError:
            return
        port = int(request.split(b"\r\n", 2)[1].rpartition(b":")[2])
        began, answer = time.perf_counter(), b""
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(request)
            while part := connection.recv(65536):
                answer += part
        took = time.perf_counter() - began
        assert answer.startswith(b"HTTP/1.1 200"), answer[:500]
        commands.send_bytes(json.dumps(took).encode())
