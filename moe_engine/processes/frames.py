"""Decoding of messages from ZeroMQ sockets; malformed frames are dropped with a warning.

Anything can arrive at a port: a port scanner's bytes, a message of another version, the result of a bug. A malformed
frame must never end a receive loop, because every request and every heartbeat passes through one. So all receive loops
read through a `FrameReader`.

    reader = FrameReader("engine core", messages.decode_to_core)
    for message in reader.drain(socket): ...                        # PULL, SUB: one frame per message
    message = reader.take(await async_socket.recv_multipart())      # the same with asyncio
    identity, *frames = router.recv_multipart(zmq.NOBLOCK)          # ROUTER: the identity is the caller's
    message = reader.take(frames)                                   # None: dropped
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import zmq

logger = logging.getLogger("moe_engine")

T = TypeVar("T")

WARNING_SECONDS = 10.0
"""Minimum time between two warnings of one reader."""
MAX_DRAIN = 4096
"""Max frames per `drain`, so that a flood cannot block the caller's other work."""


class FrameReader(Generic[T]):
    """Decodes the frames of one socket. A frame that cannot be decoded is counted, logged and dropped.

    Args:
        name: of the socket's owner, for the log (``engine core``).
        decode: bytes of one frame -> message; may raise anything.
        clock: seconds; for tests.

    Attributes:
        num_dropped: frames and messages dropped so far.
    """

    def __init__(self, name: str, decode: Callable[[bytes], T], clock: Callable[[], float] = time.monotonic) -> None:
        self.num_dropped = 0
        self._name = name
        self._decode = decode
        self._clock = clock
        self._next_warning = -float("inf")

    def take(self, frames: Sequence[bytes]) -> T | None:
        """Decodes the frames of one ZeroMQ message; None if they were dropped."""
        if len(frames) != 1:
            self.drop(f"{len(frames)} frames instead of one")
            return None
        try:
            return self._decode(frames[0])
        except Exception as error:  # msgspec's errors, UnicodeDecodeError, RecursionError, MemoryError, ...
            self.drop(f"{len(frames[0])} bytes that do not decode: {type(error).__name__}: {error}")
            return None

    def drain(self, socket: zmq.Socket[bytes]) -> Iterator[T]:
        """The queued messages of a socket, without waiting. The socket is read as the iterator advances."""
        for _ in range(MAX_DRAIN):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if (message := self.take(frames)) is not None:
                yield message

    def drop(self, reason: str) -> None:
        """Counts and logs a dropped message: for callers that reject a decoded message, such as one of a rank that does
        not exist. At most one warning per `WARNING_SECONDS`."""
        self.num_dropped += 1
        now = self._clock()
        if now >= self._next_warning:
            self._next_warning = now + WARNING_SECONDS
            logger.warning("%s: dropped a message: %.200s (%d dropped so far)", self._name, reason, self.num_dropped)
