"""The state of transfers on a decode rank: rooms, their legs, and the connections to prefill ranks."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import zmq

from moe_engine.core.kv_transfer import wire
from moe_engine.core.kv_transfer.layout import Layout
from moe_engine.core.kv_transfer.rows import RowPart
from moe_engine.core.kv_transfer.transports.protocol import Memory
from moe_engine.processes import open_files
from moe_engine.processes.zmq_sockets import HANDSHAKE_FAILED, JobKeys, connect
from moe_engine.scheduler.tiers.transfer_state import Receiving, State

SOCKETS_OF_PEER = 3
"""The connection, and both ends of its monitor."""
FILES_OF_PEER = 4
"""One for each of its sockets, and the connection itself."""


def max_peers() -> int:
    """Prefill ranks for which the process may open files. libzmq ends a process that has no more."""
    return max(1, (open_files.limit() - open_files.LEAST) // FILES_OF_PEER)


@dataclass
class Leg:
    peer: Peer
    state: Receiving
    attempt: int

    @property
    def is_over(self) -> bool:
        return self.state.state is not State.RECEIVING


@dataclass
class Room:
    """`places` is empty if the prompt is cached: the prefill rank must be notified anyway."""

    digest: bytes
    begin: int
    limit: int
    places: list[int]
    address: str
    """Address of the bootstrap port."""
    after: int
    """Number of the earlier copies that write to the places."""
    began: float = field(default_factory=time.monotonic)
    legs: list[Leg] = field(default_factory=list)
    reason: str = ""
    """The reason of the first leg that failed."""


class Peer:
    """A prefill rank: its connection, and the memory that it writes to. Dropped when the connection ends.

    Raises:
        zmq.ZMQError: no connection can be opened: of a wrong address, or (EMFILE) for lack of sockets.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: JobKeys | None) -> None:
        self.address = address
        self.legs: dict[int, Leg] = {}
        self.heard = time.monotonic()
        self.is_welcome = False
        self.piece_tokens = 0
        self.layout = Layout()
        self.groups: list[list[str]] = []
        """The directory, for a bootstrap port."""
        self.waiting: list[int] = []
        """Rooms that wait for the directory, for a bootstrap port."""
        self.part = RowPart()
        self.memory: Memory | None = None
        self.slot_bytes = 0
        with contextlib.ExitStack() as opened:
            self.socket = opened.enter_context(contextlib.closing(wire.dealer(context)))
            self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
            self.monitor = self.socket.get_monitor_socket(
                zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | HANDSHAKE_FAILED
            )
            opened.callback(self.monitor.close)
            connect(self.socket, address, keys)
            opened.pop_all()

    def send(self, message: list[Any]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the monitor reports the loss
            self.socket.send(wire.encode(message), flags=zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)
