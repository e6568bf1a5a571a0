"""Streams whose readers do not read: writers continue, lines keep their order, missing ones are counted."""

from __future__ import annotations

import errno
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import httpx
import pytest

from moe_engine.processes import unblocked_stream
from moe_engine.processes.unblocked_stream import UnblockedStream, unblocked
from tests.server.test_serve import PROGRAM
from tests.waiting import until

Ends = tuple[int, int]


def pipe() -> Ends:
    return os.pipe()


def sockets() -> Ends:
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


def terminal() -> Ends:
    return pty.openpty()


@pytest.fixture(params=[pipe, sockets, terminal])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    make: Callable[[], Ends] = request.param
    reader, writer = make()
    yield reader, writer
    for end in (reader, writer):
        os.close(end)


def taken(reader: int, last: str) -> list[str]:
    """The lines up to one that contains `last`."""
    found = b""
    while last not in (text := found.decode(errors="replace")).rpartition("\n")[0]:
        found += os.read(reader, 1 << 16)
    return text.replace("\r\n", "\n").splitlines()


def test_nothing_is_lost_below_the_limit(ends: Ends) -> None:
    reader, writer = ends
    with os.fdopen(writer, "w", closefd=False) as file:
        stream = unblocked(file)
        assert stream is unblocked(file) and isinstance(stream, UnblockedStream)
        lines = [f"{number} {'é' * (number % 300)}" for number in range(3000)]
        for line in lines:
            stream.write(line + "\n")
        assert taken(reader, "2999 ") == lines
        stream.wait(60.0)
        before = threading.active_count()
        for line in lines[:5]:  # at once, without the thread
            stream.write(line + "\n")
            assert threading.active_count() == before
        assert taken(reader, "4 ") == lines[:5]


def test_lines_beyond_the_limit_are_counted(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unblocked_stream, "MAX_BYTES", 5000)
    reader, writer = ends
    with os.fdopen(writer, "w", closefd=False) as file:
        stream = unblocked(file)
        for number in range(20_000):
            stream.write(f"line {number} of this log\n")
        found = taken(reader, "are missing here")
        missing = int(found.pop().split()[0])
        assert missing > 0 and found == [f"line {number} of this log" for number in range(20_000 - missing)]
        stream.write("again\n")
        assert taken(reader, "again") == ["again"]


def test_the_count_stands_where_lines_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the reader takes a part of what waits before more is written."""
    monkeypatch.setattr(unblocked_stream, "MAX_BYTES", 10_000)
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file:
        stream = unblocked(file)
        assert isinstance(stream, UnblockedStream)
        for number in range(20_000):
            stream.write(f"line {number} of this log\n")
        full = stream._size
        found = os.read(reader, 8192).decode()
        until(lambda: stream._size < full)
        for number in range(20_000, 20_100):
            stream.write(f"line {number} of this log\n")
        while "are missing here" not in found:
            found += os.read(reader, 1 << 16).decode()
        *lines, last = found.splitlines()
        assert lines == [f"line {number} of this log" for number in range(20_100 - int(last.split()[0]))]
    os.close(reader)


def test_a_reader_that_is_gone() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file:
        stream = unblocked(file)
        assert isinstance(stream, UnblockedStream)
        for _ in range(2):
            stream.write("x" * (1 << 20) + "\n")  # more than the pipe takes
        os.close(reader)
        stream.wait(60.0)
        with pytest.raises(OSError) as error:
            stream.write("y\n")
        assert error.value.errno == errno.EPIPE


def test_files_are_written_as_they_are(tmp_path) -> None:
    with open(tmp_path / "log", "w") as file:
        assert unblocked(file) is file


def test_a_server_whose_log_nobody_reads() -> None:
    """More requests than a pipe has room for their lines; the end of the log arrives once it is read."""
    program = PROGRAM.replace('log_level="warning"', 'log_level="info"')
    process = subprocess.Popen(
        [sys.executable, "-c", program, "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        port = process.stdout.readline().split()[1]
        path = "/health?" + "x" * 2000
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            for _ in range(60):
                assert client.get(path).status_code == 200
        process.send_signal(signal.SIGTERM)
        lines = process.stderr.read().splitlines()
        assert process.wait(60) == 0
        assert sum(path in line for line in lines) == 60
        assert re.search("Finished server process", lines[-1])
    finally:
        process.kill()
        process.wait()


def test_the_exit_does_not_wait_for_a_reader_that_never_comes() -> None:
    program = "import sys; from moe_engine.logs import setup_logging as s; s().info('%s', 'x' * 300_000)"
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
    try:
        until(lambda: process.poll() is not None)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
