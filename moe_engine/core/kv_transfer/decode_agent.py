"""The thread of a decode rank that receives KV into places of its tier.

A room is a request's transfer. It has one leg, with a state machine of its own, for each prefill rank that holds a part
of the KV; several if the prefill server has more shares of the KV. The room is complete when all legs are.
"""

from __future__ import annotations

import errno
import itertools
import logging
import time
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from moe_engine.core.kv_transfer import wire
from moe_engine.core.kv_transfer.agent import AgentSetup, TransferAgent
from moe_engine.core.kv_transfer.decode_rooms import SOCKETS_OF_PEER, Leg, Peer, Room, max_peers
from moe_engine.core.kv_transfer.directory import address_at
from moe_engine.core.kv_transfer.layout import Layout, parts, sources_of
from moe_engine.core.kv_transfer.transports.protocol import TransportError
from moe_engine.processes import open_files
from moe_engine.processes.zmq_sockets import HANDSHAKE_FAILED, SECRET_HINT
from moe_engine.scheduler.tiers.transfer_state import Message, Receiving, State
from moe_engine.types.row_sizes import TRANSFER_SLOTS as NUM_SLOTS

CONNECT_SECONDS = 5.0
CLOSED = f"closed in the handshake: a proxy without the server behind it, or other secrets: {SECRET_HINT}"
"""A proxy accepts connections to a dead server and closes them, as a server with another secret does."""
SOCKETS_OF_THREAD = 2
logger = logging.getLogger("moe_engine")


class DecodeAgent(TransferAgent):
    """
    Args:
        default_port: bootstrap port of requests without one.

    Raises:
        TransportError: the transport does not start.
    """

    def __init__(self, setup: AgentSetup, default_port: int, rank: int = 0) -> None:
        max_sockets = SOCKETS_OF_THREAD + SOCKETS_OF_PEER * max_peers()
        super().__init__(setup, rank, lambda peer, frames: None, max_sockets)
        self._default_port = default_port
        self._peers: dict[str, Peer] = {}
        self._rooms: dict[int, Room] = {}
        self._late: list[tuple[int, Room]] = []
        """Rooms that wait for copies."""
        self._settled = 0
        self._attempts = itertools.count(1)
        self._start()

    def _is_busy(self) -> bool:
        return bool(self._late)

    def _receive(self) -> None:
        for peer in list(self._peers.values()):
            if peer.socket in self._ready or peer.monitor in self._ready:
                self._serve(peer)

    def _advance(self) -> None:
        if self._late:
            late, self._late = self._late, []
            for number, room in late:
                if self._rooms.get(number) is room:
                    self._ask(number, room)

    def _leave(self) -> None:
        for peer in list(self._peers.values()):
            self._lose(peer, "the decode server stops")
        self._transport.close()

    # -- commands

    def _command(self, name: str, number: int, *values: Any) -> None:
        if name == "want":
            self._want(number, *values)
        elif name == "settled":
            self._settled = values[0]
        elif (room := self._rooms.get(number)) is not None:
            self._fail(number, room, "the request ended")
            if not room.legs:  # no request was sent to its prefill server so far
                self._want_none(number, room)

    def _want(
        self, number: int, host: str, port: int, digest: bytes, begin: int, limit: int, after: int, places: list[int]
    ) -> None:
        if number in self._rooms and not places:
            return  # the room of another request
        host = f"[{host}]" if ":" in host else host
        address = f"tcp://{host}:{port or self._default_port}"
        room = self._rooms[number] = Room(digest, begin, limit, places, address, after)
        self._ask(number, room)

    def _want_none(self, number: int, room: Room) -> None:
        room = self._rooms[number] = Room(room.digest, room.begin, room.begin, [], room.address, 0)
        self._ask(number, room)

    def _ask(self, number: int, room: Room) -> None:
        """Requests the KV from the prefill server, after the copies to the room's places: a later copy would overwrite
        received KV."""
        if room.after > max(self._rows.stored, self._settled):
            self._late.append((number, room))
            return
        bootstrap = self._peer(number, room, room.address)
        if bootstrap is None:
            return
        if bootstrap.is_welcome:
            self._begin(number, room, bootstrap)
        else:
            bootstrap.waiting.append(number)

    def _begin(self, number: int, room: Room, bootstrap: Peer) -> None:
        """Requests the KV from the ranks of the attention group that computed it; the room selects the group."""
        addresses = bootstrap.groups[number % len(bootstrap.groups)]
        for source in sources_of(self._rank, self._layout, bootstrap.layout):
            peer = self._peer(number, room, address_at(addresses[source], bootstrap.address))
            if peer is None:
                return
            leg = Leg(peer, Receiving(room.digest, room.begin, room.limit), next(self._attempts))
            room.legs.append(leg)
            peer.legs[number] = leg
            if not self._open_window(peer):
                return
            self._send_all(number, leg, leg.state.open())
        if not room.places:
            self._fail(number, room, "cached")

    def _peer(self, number: int, room: Room, address: str) -> Peer | None:
        """The prefill rank at an address; None if no connection to it can be opened: the room has failed."""
        peer = self._peers.get(address)
        if peer is not None:
            return peer
        try:
            peer = self._peers[address] = Peer(self._context, address, self._keys)
        except zmq.ZMQError as error:
            count, reason = len(self._peers), str(error)
            if error.errno == errno.EMFILE:
                reason = f"connections to {count} prefill ranks are the most for ulimit -n {open_files.limit()}"
            self._fail(number, room, f"{address}: {reason}")
            return None
        for socket in (peer.socket, peer.monitor):
            self._poller.register(socket, zmq.POLLIN)
        self._send_to(peer, ["hello", self._schema, self._layout.values, self._rank])
        return peer

    # -- messages

    def _serve(self, peer: Peer) -> None:
        while self._peers.get(peer.address) is peer and peer.socket.poll(0):
            frames = peer.socket.recv_multipart(copy=False)
            peer.heard = time.monotonic()
            try:
                name, *values = wire.decode(bytes(frames[0].buffer))
                if name == "bytes":
                    self._transport.receive(values, frames[1].buffer)
                elif name == "welcome":
                    self._welcome(peer, *values)
                elif name == "refused":
                    self._lose(peer, f"{peer.address} refuses: {values[0]}")
                elif name in ("data", "done", "nack"):
                    number, attempt, *rest = values
                    leg = peer.legs.get(number)
                    if leg is not None and leg.attempt == attempt:
                        self._handle(number, leg, name, rest)
            except TransportError as error:
                logger.warning("%s: %s", peer.address, error)
            except (msgspec.MsgspecError, ValueError, TypeError, IndexError) as error:
                self._lose(peer, f"{peer.address}: not a message of a prefill server: {error}")
        while self._peers.get(peer.address) is peer and peer.monitor.poll(0):
            event = recv_monitor_message(peer.monitor)["event"]
            failed = CLOSED if event & HANDSHAKE_FAILED else "no connection"
            self._lose(peer, f"{peer.address}: {failed}")

    def _welcome(
        self, peer: Peer, piece_tokens: int, rank: int, layout: list[int], groups: list[list[str]] | None
    ) -> None:
        peer.is_welcome, peer.piece_tokens, peer.layout = True, piece_tokens, Layout(*layout)
        peer.part = parts(self._rank, self._layout, rank, peer.layout)[1]
        if peer.legs and not self._open_window(peer):
            return
        peer.groups = groups or []
        waiting, peer.waiting = peer.waiting, []
        for number in waiting:
            if (room := self._rooms.get(number)) is not None and not room.legs:
                self._begin(number, room, peer)

    def _open_window(self, peer: Peer) -> bool:
        """Memory for the pieces of a rank that sends KV; False if the peer was dropped for lack of it."""
        if not peer.is_welcome or peer.memory is not None:
            return True
        peer.slot_bytes = peer.piece_tokens * peer.part.bytes_of(self._rows)
        try:
            peer.memory = self._transport.register(NUM_SLOTS * peer.slot_bytes)
        except TransportError as error:
            logger.error("%s", error)
            self._lose(peer, str(error))
            return False
        self._send_to(peer, ["window", peer.memory.description, peer.slot_bytes])
        return True

    def _handle(self, number: int, leg: Leg, name: str, values: list[Any]) -> None:
        if name == "data":
            answers = self._take(number, leg, *values)
        else:
            answers = leg.state.handle((name, *values))
        self._send_all(number, leg, answers)
        self._finish(number, self._rooms[number])

    def _take(self, number: int, leg: Leg, begin: int, end: int, slot: int, expected: int) -> list[Message]:
        """A piece has arrived in a slot."""
        state, peer, room = leg.state, leg.peer, self._rooms[number]
        if not state.accepts(begin, end) or peer.memory is None:
            return state.handle(("data", begin, end))
        size = (end - begin) * peer.part.bytes_of(self._rows)
        first = slot * peer.slot_bytes
        values = peer.memory.array[first : first + size]
        if not 0 <= slot < NUM_SLOTS or size > peer.slot_bytes or wire.checksum(values) != expected:
            return state.fail("the bytes of a piece have another size or checksum than the sender's")
        peer.part.write(self._rows, room.places[begin - room.begin : end - room.begin], values)
        return state.handle(("data", begin, end))

    # -- ends

    def _fail(self, number: int, room: Room, reason: str) -> None:
        room.reason = room.reason or reason
        for leg in room.legs:
            self._send_all(number, leg, leg.state.fail(reason))
        self._finish(number, room)

    def _finish(self, number: int, room: Room) -> None:
        """Reports the room once all of its legs are over; ends them if one has failed."""
        failed = next((leg.state.reason for leg in room.legs if leg.state.state is State.FAILED), "")
        if not all(leg.is_over for leg in room.legs):
            if failed:
                self._fail(number, room, failed)
            return
        if self._rooms.pop(number, None) is None:
            return
        for leg in room.legs:
            leg.peer.legs.pop(number, None)
        reason = room.reason or failed
        if not room.places:
            return
        if reason:
            self._report("failed", number, reason)
        else:
            self._report("filled", number, min(leg.state.end for leg in room.legs))

    def _send_to(self, peer: Peer, message: list[Any]) -> None:
        peer.send(message)

    def _beat(self, now: float) -> None:
        for peer in list(self._peers.values()):
            limit = wire.SILENCE_SECONDS if peer.is_welcome else CONNECT_SECONDS
            if now - peer.heard > limit:
                self._lose(peer, f"{peer.address}: no message for {limit:g} s")
            else:
                self._send_to(peer, ["beat"])
        for number, room in list(self._rooms.items()):
            if now - room.began > wire.TRANSFER_SECONDS:
                self._fail(number, room, "the deadline has passed")

    def _lose(self, peer: Peer, reason: str) -> None:
        """The connection has ended: so do its transfers. The next request connects again."""
        if self._peers.get(peer.address) is peer:
            del self._peers[peer.address]
            for socket in (peer.socket, peer.monitor):
                self._poller.unregister(socket)
        for number in peer.waiting:
            if (room := self._rooms.get(number)) is not None:
                self._fail(number, room, reason)
        for number, leg in list(peer.legs.items()):
            leg.state.lost(reason)
            if number in self._rooms:
                self._finish(number, self._rooms[number])
        peer.close()
        if peer.memory is not None:
            self._transport.release(peer.memory)
