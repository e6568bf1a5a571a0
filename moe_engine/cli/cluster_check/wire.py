"""Messages between the nodes of a check, and their connections."""

from __future__ import annotations

import asyncio
import os
import struct
from typing import Any, TypeVar

import msgspec

LENGTH = struct.Struct("!I")
MAX_BYTES = 1 << 24


class NodeFacts(msgspec.Struct):
    """Facts of one node. `versions`: by package, including ``python``; `time`: seconds of its own clock."""

    host: str
    versions: dict[str, str]
    time: float
    cores: int
    available_bytes: int
    shared_bytes: int | None
    """Free bytes in /dev/shm; None if it does not exist."""
    problems: list[str]


class Hello(msgspec.Struct, tag=True):
    """A node joins. It listens on `ports`."""

    node_rank: int
    facts: NodeFacts
    ports: list[int]


class Peer(msgspec.Struct):
    node_rank: int
    address: str
    ports: list[int]


class TryLinks(msgspec.Struct, tag=True):
    peers: list[Peer]


class BrokenLink(msgspec.Struct):
    """Failed link from the reporting node to node `to` on `port`."""

    to: int
    port: int
    reason: str


class LinksTried(msgspec.Struct, tag=True):
    """`slowest` is the longest round trip of a block of `links.BLOCK_BYTES`, in seconds."""

    broken: list[BrokenLink]
    slowest: float


class StartEngine(msgspec.Struct, tag=True):
    """Flags of ``moe-engine serve``, equal on all nodes."""

    flags: list[str]


class EngineEnded(msgspec.Struct, tag=True):
    """`tail`: its last log lines."""

    code: int
    tail: list[str]


class End(msgspec.Struct, tag=True):
    ok: bool


class Ping(msgspec.Struct, tag=True):
    block: bytes


class Pong(msgspec.Struct, tag=True):
    block: bytes


Message = Hello | TryLinks | LinksTried | StartEngine | EngineEnded | End | Ping | Pong
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Message)
T = TypeVar("T")


class ConnectionLost(Exception):
    """The peer closed the connection, is silent or sent an invalid message; the text says which."""


class Channel:
    """One connection. Its `receive` belongs to one task."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.peer_address: str = writer.get_extra_info("peername")[0]

    async def send(self, message: Any) -> None:
        data = _encoder.encode(message)
        try:
            self._writer.write(LENGTH.pack(len(data)) + data)
            await self._writer.drain()
        except OSError as error:
            raise ConnectionLost(reason_of(error)) from None

    async def receive(self, kind: type[T], seconds: float | None = None) -> T:
        """The next message, which must be a `kind`.

        Raises:
            ConnectionLost: no message within `seconds`, or one of another kind.
        """
        try:
            async with asyncio.timeout(seconds):
                (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                if size > MAX_BYTES:
                    raise ConnectionLost("another program listens there")
                message = _decoder.decode(await self._reader.readexactly(size))
        except TimeoutError:
            raise ConnectionLost(f"no answer within {seconds:g} s") from None
        except asyncio.IncompleteReadError:
            raise ConnectionLost("the connection was closed") from None
        except msgspec.DecodeError:
            raise ConnectionLost("another program, or another version of this one, listens there") from None
        except OSError as error:
            raise ConnectionLost(reason_of(error)) from None
        if not isinstance(message, kind):
            raise ConnectionLost(f"received {type(message).__name__}, expected {kind.__name__}")
        return message

    def close(self) -> None:
        self._writer.close()


async def connect(host: str, port: int, seconds: float) -> Channel:
    """Raises ConnectionLost."""
    try:
        async with asyncio.timeout(seconds):
            return Channel(*await asyncio.open_connection(host, port))
    except TimeoutError:
        raise ConnectionLost(f"no answer within {seconds:g} s") from None
    except OSError as error:
        raise ConnectionLost(reason_of(error)) from None


def reason_of(error: OSError) -> str:
    """``connection refused``: without addresses and error numbers, which the caller adds."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return (error.strerror or str(error)).lower()
