"""Many streaming clients in one thread, with little processor time: sockets and epoll, no HTTP library, no JSON.

No command; used by `benchmarks.many_streams` and `benchmarks.structured_output`. A client library that parses every
event takes more processor time for a token than the server does, and clients usually run on other machines.
"""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

EVENT_END = b"\n\n"
RECEIVE_BYTES = 65536
TAIL_BYTES = 1024
TOKENS = re.compile(rb'"completion_tokens":(\d+)')
SLOW_BYTES, SLOW_PAUSE = 512, 0.1
"""Bytes per read of a slow client, and seconds between its reads."""


@dataclass
class ReadStream:
    """One stream. `moments`: times in seconds of each read that completes an event, since the first request was
    sent."""

    moments: list[float] = field(default_factory=list)
    num_events: int = 0
    tail: bytes = b""

    def add(self, data: bytes, moment: float) -> None:
        count = data.count(EVENT_END)
        if count:
            self.moments.append(moment)
            self.num_events += count
        self.tail = data if len(data) >= TAIL_BYTES else self.tail[-TAIL_BYTES:] + data

    @property
    def num_tokens(self) -> int:
        """The server's count in the last event; 0 if the stream was cut."""
        found = TOKENS.findall(self.tail)
        return int(found[-1]) if found and b"data: [DONE]" in self.tail else 0

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.moments, self.moments[1:])]


def read_streams(
    port: int,
    requests: list[bytes],
    slow: bytes | None = None,
    *,
    when_running: Callable[[], object] | None = None,
    running_events: int = 20,
) -> tuple[float, list[ReadStream]]:
    """Sends all requests and reads all answers; returns the total seconds, and the streams.

    Args:
        requests: head and body of each, with ``Connection: close``.
        slow: a further request, whose answer is read slowly and not completely.
        when_running: called once, when every stream has `running_events` events.
    """
    poll, streams = select.epoll(), [ReadStream() for _ in requests]
    sockets: dict[int, tuple[socket.socket, ReadStream]] = {}
    beside = None if slow is None else _connect_slowly(port, slow)
    began, left, slow_at = time.perf_counter(), len(requests), 0.0
    try:
        for request, stream in zip(requests, streams):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(request)
            connection.setblocking(False)
            sockets[connection.fileno()] = connection, stream
            poll.register(connection.fileno(), select.EPOLLIN)
        while left:
            for number, _ in poll.poll(SLOW_PAUSE):
                connection, stream = sockets[number]
                data = connection.recv(RECEIVE_BYTES)
                if data:
                    stream.add(data, time.perf_counter() - began)
                else:
                    poll.unregister(number)
                    left -= 1
            if when_running is not None and min(stream.num_events for stream in streams) >= running_events:
                when_running()
                when_running = None
            if beside is not None and time.perf_counter() > slow_at + SLOW_PAUSE:
                slow_at = time.perf_counter()
                _read_a_little(beside)
        return time.perf_counter() - began, streams
    finally:
        poll.close()
        for connection, _ in sockets.values():
            connection.close()
        if beside is not None:
            beside.close()


def _connect_slowly(port: int, request: bytes) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.sendall(request)
    connection.setblocking(False)
    return connection


def _read_a_little(connection: socket.socket) -> None:
    with suppress(BlockingIOError):
        connection.recv(SLOW_BYTES)
