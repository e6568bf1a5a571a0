"""Common base of the transfer threads of a prefill and a decode rank: one turn of the thread, and names.

A room is a request's transfer, and a leg its part with one rank of the other server, with a state machine of its own.
Rooms are kept by number, peers by address.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from moe_engine.core.kv_transfer import wire
from moe_engine.core.kv_transfer.layout import Layout
from moe_engine.core.kv_transfer.rows import StagedRows
from moe_engine.core.kv_transfer.thread import TransferThread
from moe_engine.core.kv_transfer.transports.protocol import Send, Transport
from moe_engine.scheduler.transfer_link import TransferLink
from moe_engine.scheduler.transfer_state import Message


class Leg(Protocol):
    """`attempt`: number of the decode rank's request, in every message of the leg."""

    peer: Any
    attempt: int


class TransferAgent(TransferThread):
    """
    Args:
        rows: the places of the tier.
        schema: what the handshake compares.
        open_transport: opens the transport, with the function that sends its bytes over the connection.
        layout, rank: this rank among those of its attention group.
        deliver: that function.
        wake_core: ends a wait of the core's loop.

    Raises:
        TransportError: the transport does not start.
    """

    def __init__(
        self,
        link: TransferLink,
        rows: StagedRows,
        schema: dict[str, str],
        wake_core: Callable[[], None],
        open_transport: Callable[[Send], Transport],
        layout: Layout | None,
        rank: int,
        deliver: Send,
        max_sockets: int = 0,
    ) -> None:
        super().__init__(link, wake_core, max_sockets)
        self._rows, self._schema = rows, schema
        self._layout, self._rank = layout or Layout(), rank
        self._transport = open_transport(deliver)
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
