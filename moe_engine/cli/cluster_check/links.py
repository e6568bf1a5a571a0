"""Link tests between nodes: a listener that echoes blocks, and the client that measures round trips."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence

from moe_engine.cli.cluster_check.wire import (
    BrokenLink,
    Channel,
    ConnectionLost,
    Hello,
    LinksTried,
    Peer,
    Ping,
    Pong,
    connect,
)

BLOCK_BYTES = 1 << 16
"""Larger than any network's packet: detects paths that connect but drop full-sized packets (MTU problems)."""
TRY_SECONDS = 3.0
AT_ONCE = 64

OnHello = Callable[[Channel, Hello], Awaitable[None]]


class Listener:
    """Serves other nodes on one port until `close`.

    Args:
        on_hello: takes over the connections of nodes that join; without one they are closed.
    """

    def __init__(self, server: asyncio.Server) -> None:
        self._server = server
        self.family: int = server.sockets[0].family
        self.port: int = server.sockets[0].getsockname()[1]

    @classmethod
    async def open(cls, family: int, port: int, on_hello: OnHello | None = None) -> Listener:
        """Raises OSError: the port is in use."""

        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            channel = Channel(reader, writer)
            with contextlib.suppress(ConnectionLost):
                message = await channel.receive(object, TRY_SECONDS)
                if isinstance(message, Hello) and on_hello is not None:
                    await on_hello(channel, message)
                    return
                if isinstance(message, Ping):
                    await channel.send(Pong(message.block))
            channel.close()

        host = "::" if family == socket.AF_INET6 else "0.0.0.0"
        return cls(await asyncio.start_server(greet, host, port, family=socket.AddressFamily(family)))

    def close(self) -> None:
        self._server.close()


async def try_links(peers: Sequence[Peer]) -> LinksTried:
    """Tests the links from this node to every port of the others, concurrently."""
    gate = asyncio.Semaphore(AT_ONCE)
    targets = [(peer, port) for peer in peers for port in peer.ports]

    async def one(peer: Peer, port: int) -> float | BrokenLink:
        async with gate:
            try:
                return await _round_trip(peer.address, port)
            except ConnectionLost as error:
                return BrokenLink(peer.node_rank, port, str(error))

    results = await asyncio.gather(*(one(peer, port) for peer, port in targets))
    broken = [result for result in results if isinstance(result, BrokenLink)]
    return LinksTried(broken, max((result for result in results if isinstance(result, float)), default=0.0))


async def _round_trip(address: str, port: int) -> float:
    channel = await connect(address, port, TRY_SECONDS)
    try:
        block, began = os.urandom(BLOCK_BYTES), time.monotonic()
        await channel.send(Ping(block))
        answer = await channel.receive(Pong, TRY_SECONDS)
        if answer.block != block:
            raise ConnectionLost("the echoed block differs from the one sent")
        return time.monotonic() - began
    finally:
        channel.close()
