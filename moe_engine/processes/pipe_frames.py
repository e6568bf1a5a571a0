"""Frames on the pipes of a child process: 4 bytes of length, then the data."""

from __future__ import annotations

from typing import IO

LENGTH_BYTES = 4


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def write_frame(stream: IO[bytes], data: bytes) -> None:
    stream.write(frame(data))
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes:
    """Raises EOFError if the other side has closed the stream."""
    length = stream.read(LENGTH_BYTES)
    data = stream.read(int.from_bytes(length, "little")) if len(length) == LENGTH_BYTES else b""
    if len(length) < LENGTH_BYTES or len(data) < int.from_bytes(length, "little"):
        raise EOFError
    return data
