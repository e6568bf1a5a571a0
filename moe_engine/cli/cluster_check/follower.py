"""Follower node of a check: joins, executes node 0's orders, exits with its result."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from moe_engine.cli.cluster_check import facts
from moe_engine.cli.cluster_check.engine_trial import EngineProcess
from moe_engine.cli.cluster_check.links import Listener, try_links
from moe_engine.cli.cluster_check.wire import (
    Channel,
    ConnectionLost,
    End,
    EngineEnded,
    Hello,
    StartEngine,
    TryLinks,
    connect,
)

CONNECT_SECONDS = 3.0
AGAIN_SECONDS = 0.3
PROGRESS_SECONDS = 5.0
T = TypeVar("T")


class Over(Exception):
    """Node 0 has finished the check."""

    def __init__(self, ok: bool) -> None:
        super().__init__(ok)
        self.ok = ok


@dataclass(frozen=True)
class Follower:
    """Node `node_rank`; node 0 listens at `host` and `port`."""

    node_rank: int
    host: str
    port: int
    join_seconds: float
    log: Callable[[str], None] = print

    async def run(self) -> int:
        """Returns the exit code: 0 if all checks of node 0 passed."""
        channel = await self._connect()
        if channel is None:
            return 1
        listeners = await _listen(self.port, socket.AF_INET6 if ":" in channel.peer_address else socket.AF_INET)
        try:
            ports = [listener.port for listener in listeners]
            await channel.send(Hello(self.node_rank, facts.gather(), ports))
            links = await _order(channel, TryLinks)
            await channel.send(await try_links(links.peers))
            for listener in listeners:
                listener.close()
            await self._engine(channel)
        except Over as over:
            return int(not over.ok)
        except ConnectionLost as error:
            self.log(f"FAILED {self._name} lost node 0 at {self.host}:{self.port}: {error}")
        finally:
            channel.close()
            for listener in listeners:
                listener.close()
        return 1

    @property
    def _name(self) -> str:
        return f"node {self.node_rank} ({socket.gethostname()})"

    async def _connect(self) -> Channel | None:
        """Retries until node 0 listens, which may start later; logs the reason periodically."""
        began = logged_at = time.monotonic()
        while True:
            try:
                return await connect(self.host, self.port, CONNECT_SECONDS)
            except ConnectionLost as error:
                reason = str(error)
            now = time.monotonic()
            where = f"node 0 at {self.host}:{self.port}: {reason}"
            if now - began > self.join_seconds:
                self.log(f"FAILED {self._name} cannot reach {where}")
                return None
            if now - logged_at > PROGRESS_SECONDS:
                logged_at = now
                self.log(f"{self._name} waits for {where}")
            await asyncio.sleep(AGAIN_SECONDS)

    async def _engine(self, channel: Channel) -> None:
        """Runs this node's part of the engine and reports its exit, until node 0 ends the check."""
        order = await _order(channel, StartEngine)
        engine = await EngineProcess.start(order.flags, self.node_rank)
        reporting = asyncio.create_task(_report(engine, channel))
        try:
            await _order(channel, End)
        finally:
            reporting.cancel()
            await engine.stop()


async def _order(channel: Channel, kind: type[T]) -> T:
    """Node 0's next order. Raises `Over` at the end of the check."""
    message = await channel.receive(object)
    if isinstance(message, End):
        raise Over(message.ok)
    if not isinstance(message, kind):
        raise ConnectionLost(f"received {type(message).__name__}, expected {kind.__name__}")
    return message


async def _report(engine: EngineProcess, channel: Channel) -> None:
    ended: EngineEnded = await engine.ended()
    with contextlib.suppress(ConnectionLost):
        await channel.send(ended)


async def _listen(port: int, family: int) -> list[Listener]:
    """Listens on node 0's port number, if it is free here, and on another free port."""
    listeners = []
    with contextlib.suppress(OSError):
        listeners.append(await Listener.open(family, port))
    return [*listeners, await Listener.open(family, 0)]
