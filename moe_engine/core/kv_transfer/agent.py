"""Common base of the transfer threads of a prefill and a decode rank: one turn of the thread, and names.

A room is a request's transfer, and a leg its part with one rank of the other server, with a state machine of its own.
Rooms are kept by number, peers by address.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from moe_engine.core.kv_transfer import wire
from moe_engine.core.kv_transfer.layout import Layout
from moe_engine.core.kv_transfer.thread import TransferThread
from moe_engine.core.kv_transfer.transports.protocol import Send, Transport
from moe_engine.processes.zmq_sockets import JobKeys
from moe_engine.scheduler.tiers.transfer_link import TransferLink
from moe_engine.scheduler.tiers.transfer_state import Message

if TYPE_CHECKING:
    from moe_engine.worker.kv_cache.transfer_copies import TransferCopies


class Leg(Protocol):
    """`attempt`: number of the decode rank's request, in every message of the leg."""

    peer: Any
    attempt: int


@dataclass(frozen=True)
class AgentSetup:
    """What the agents of both sides are made of.

    Attributes:
        rows: the places of the tier.
        schema: what the handshake compares.
        keys: of the connections; None: they are not encrypted.
        wake_core: ends a wait of the core's loop.
        open_transport: opens the transport, with the function that sends its bytes over the connection.
        layout: of the ranks of the attention group.
    """

    link: TransferLink
    rows: TransferCopies
    schema: dict[str, str]
    keys: JobKeys | None
    wake_core: Callable[[], None]
    open_transport: Callable[[Send], Transport]
    layout: Layout = field(default_factory=Layout)


class TransferAgent(TransferThread):
    """
    Args:
        rank: this rank among those of its attention group.
        deliver: sends bytes of the transport over the connection.

    Raises:
        TransportError: the transport does not start.
    """

    def __init__(self, setup: AgentSetup, rank: int, deliver: Send, max_sockets: int = 0) -> None:
        super().__init__(setup.link, setup.wake_core, max_sockets)
        self._rows, self._schema, self._keys = setup.rows, setup.schema, setup.keys
        self._layout, self._rank = setup.layout, rank
        self._transport = setup.open_transport(deliver)
        self._beat_at = time.monotonic()

    def _turn(self) -> None:
        self._receive()
        while self._link.commands:
            self._command(*self._link.commands.popleft())
        self._advance()
        now = time.monotonic()
        if now - self._beat_at > wire.BEAT_SECONDS:
            self._beat_at = now
            self._beat(now)

    def _send_all(self, number: int, leg: Leg, messages: list[Message]) -> None:
        """The messages of a leg's state machine."""
        for name, *values in messages:
            self._send_to(leg.peer, [name, number, leg.attempt, *values])

    # -- of the side

    def _receive(self) -> None:
        """Handles the messages of all peers."""
        raise NotImplementedError

    def _command(self, name: str, number: int, *values: Any) -> None:
        """A command of the scheduler."""
        raise NotImplementedError

    def _advance(self) -> None:
        """Goes on with transfers."""
        raise NotImplementedError

    def _beat(self, now: float) -> None:
        """Once in `wire.BEAT_SECONDS`: messages to all peers, and peers that are silent."""
        raise NotImplementedError

    def _send_to(self, peer: Any, message: list[Any]) -> None:
        """Sends a message to a peer, if it is not lost."""
        raise NotImplementedError
