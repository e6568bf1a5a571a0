"""The thread of a prefill rank that sends KV: reads staged places, writes them to decode ranks.

A room is a request's transfer. Each decode rank that takes a part of it is a leg, with a state machine of its own; a
prefill rank has several legs if the decode server has more ranks. Places are released when all legs have read them.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec
import zmq

from moe_engine.core.kv_transfer import wire
from moe_engine.core.kv_transfer.agent import AgentSetup, TransferAgent
from moe_engine.core.kv_transfer.directory import Directory, Home
from moe_engine.core.kv_transfer.layout import Layout, consumers_of, parts
from moe_engine.core.kv_transfer.prefill_rooms import Consumer, Leg, Piece, Room
from moe_engine.core.kv_transfer.schema import difference
from moe_engine.core.kv_transfer.transports.protocol import TransportError
from moe_engine.core.kv_transfer.windows import SendWindow
from moe_engine.processes.zmq_sockets import bind, connect
from moe_engine.scheduler.tiers.transfer_state import Message, State
from moe_engine.types.row_sizes import TRANSFER_PIECE_TOKENS as PIECE_TOKENS
from moe_engine.types.row_sizes import TRANSFER_SLOTS as NUM_SLOTS

logger = logging.getLogger("moe_engine")


class PrefillAgent(TransferAgent):
    """
    Args:
        address: to bind.
        home: this rank among those of its server.

    Raises:
        ConfigError: the port cannot be bound.
        TransportError: the transport does not start.
    """

    def __init__(self, setup: AgentSetup, address: str, home: Home | None = None) -> None:
        self._home = home or Home()
        super().__init__(setup, self._home.rank, self._deliver)
        self._directory = Directory(self._home.num_groups, self._layout)
        self._rooms: dict[int, Room] = {}
        self._peers: dict[bytes, Consumer] = {}
        self._socket = wire.router(self._context)
        self.address = bind(self._socket, address, self._keys, "--disaggregation-bootstrap-port")
        self._registration = self._register()
        self._poller.register(self._socket, zmq.POLLIN)
        self._start()

    def _register(self) -> zmq.Socket[bytes] | None:
        """Registers in the directory at the bootstrap port: its own, or that of another rank, which may start later."""
        home = self._home
        if not home.bootstrap:
            self._directory.register(home.group, home.rank, "")
            return None
        socket = wire.dealer(self._context)
        connect(socket, home.bootstrap, self._keys)
        port = self.address.rpartition(":")[2]
        socket.send(wire.encode(["register", home.group, home.rank, f"{home.advertised}:{port}"]))
        return socket

    def _is_busy(self) -> bool:
        return any(room.may_read or any(leg.writes for leg in room.legs.values()) for room in self._rooms.values())

    def _receive(self) -> None:
        while self._socket.poll(0):
            peer, header, *_ = self._socket.recv_multipart(copy=False)
            self._read_message(peer.bytes, header)

    def _advance(self) -> None:
        for number, room in list(self._rooms.items()):
            self._go_on(number, room)

    def _leave(self) -> None:
        for number, room in self._rooms.items():
            if room.over is None:
                self._end(number, room, "the prefill server stops")
        self._transport.close()

    # -- messages

    def _read_message(self, peer: bytes, header: zmq.Frame) -> None:
        try:
            name, *values = wire.decode(header.bytes)
            if name == "register":
                self._directory.register(*values)
                self._welcome_waiting()
                return
            if name == "hello":
                self._peers[peer] = Consumer(0.0, str(header.get("Peer-Address")))
            consumer = self._peers.get(peer)
            if consumer is None:  # it was regarded as lost, and its transfers have ended here
                self._send_to(peer, ["refused", "the connection was silent for too long"])
                return
            consumer.heard = time.monotonic()
            if name == "hello":
                self._welcome(peer, consumer, *values)
            elif name == "window":
                self._open(peer, consumer, *values)
            elif name in ("want", "got", "cancel"):
                number, attempt, *rest = values
                self._handle(peer, consumer, number, attempt, (name, *rest))
        except (msgspec.MsgspecError, ValueError, TypeError, IndexError) as error:
            logger.warning("A message at --disaggregation-bootstrap-port is not of a decode server: %s", error)

    def _welcome(self, peer: bytes, consumer: Consumer, schema: dict[str, str], layout: list[int], rank: int) -> None:
        reason = difference(self._schema, schema)
        consumer.layout, consumer.rank = Layout(*layout), rank
        if reason is not None:
            self._send_to(peer, ["refused", reason])
            return
        consumer.part = parts(rank, consumer.layout, self._rank, self._layout)[0]
        consumer.waits = True
        self._welcome_waiting()

    def _welcome_waiting(self) -> None:
        """Answers decode ranks. The owner of the directory answers them once all ranks of its server are registered."""
        groups = None
        if not self._home.bootstrap and (groups := self._directory.groups()) is None:
            return
        for peer, consumer in list(self._peers.items()):
            if consumer.waits:
                consumer.waits = False
                self._send_to(peer, ["welcome", PIECE_TOKENS, self._rank, self._layout.values, groups])

    def _open(self, peer: bytes, consumer: Consumer, description: bytes, slot_bytes: int) -> None:
        """The decode rank's memory: `NUM_SLOTS` slots."""
        expected = PIECE_TOKENS * consumer.part.bytes_of(self._rows)
        if slot_bytes != expected:
            self._send_to(peer, ["refused", f"bytes of a piece: prefill server {expected}, decode server {slot_bytes}"])
            return
        try:
            self._transport.open(peer, description)
            memory = self._transport.register(NUM_SLOTS * slot_bytes, is_target=False)
        except TransportError as error:
            logger.error("%s", error)
            self._send_to(peer, ["refused", str(error)])
            return
        self._close_window(consumer)
        consumer.window = SendWindow(memory, slot_bytes, NUM_SLOTS)

    def _handle(self, peer: bytes, consumer: Consumer, number: int, attempt: int, message: Message) -> None:
        room = self._rooms.get(number)
        if message[0] == "want":
            if room is None:
                room = self._rooms[number] = Room()
            if not self._join(peer, consumer, number, attempt, room):
                return
        leg = room.legs.get(peer) if room is not None else None
        if room is None or leg is None or leg.attempt != attempt:
            return  # of an ended transfer
        self._send_all(number, leg, leg.state.handle(message))
        if message[0] == "got" and leg.pieces:
            self._give(consumer, leg.pieces.popleft())

    def _join(self, peer: bytes, consumer: Consumer, number: int, attempt: int, room: Room) -> bool:
        """Adds a leg to a room without such a leg; otherwise refuses the peer."""
        reason = room.over
        if reason is not None:
            room.num_wants += 1
        elif peer in room.legs or room.has_met:
            reason = "another request has the same room"
        if reason is not None:
            room.num_legs = room.num_legs or len(consumers_of(self._rank, consumer.layout, self._layout))
            self._send_to(peer, ["nack", number, attempt, reason or "the transfer has ended"])
            return False
        room.num_legs = len(consumers_of(self._rank, consumer.layout, self._layout))
        room.num_wants += 1
        leg = room.legs[peer] = Leg(peer, attempt)
        if room.digest is not None:
            leg.state.offer(room.digest)
        return True

    def _command(self, name: str, number: int, *values: Any) -> None:
        room = self._rooms.get(number)
        if name == "offer":
            if room is None:
                room = self._rooms[number] = Room()
            (room.digest,) = values
            if room.over is not None:
                self._report("ended", number, room.over)
            for leg in room.legs.values():
                self._send_all(number, leg, leg.state.offer(values[0]))
        elif room is None or room.over is not None:
            return
        elif name == "send":
            room.staged.append(values)  # type: ignore[arg-type]
        elif name == "done":
            room.all_staged = True
        elif name == "drop":  # no decode rank takes its KV from this rank
            del self._rooms[number]
        else:
            self._end(number, room, str(values[0]))

    # -- transfers

    def _go_on(self, number: int, room: Room) -> None:
        legs = list(room.legs.values())
        if room.over is None and room.has_met and not room.announced:
            self._announce(number, room, legs)
        while room.may_read and room.staged[0][2] <= self._rows.stored and self._read(number, room, legs):
            pass
        for leg in legs:
            self._notify(number, room, leg)
        if room.over is None:
            ended = [leg for leg in legs if leg.state.state is State.ENDED]
            failed = next((leg.state.reason for leg in ended if leg.state.reason), "")
            if failed or (room.has_met and len(ended) == room.num_legs):
                self._end(number, room, failed)
        self._check_deadline(number, room)

    def _announce(self, number: int, room: Room, legs: list[Leg]) -> None:
        if any(leg.state.state is not State.SENDING for leg in legs):
            return
        ranges = {(leg.state.sent, leg.state.limit) for leg in legs}
        if len(ranges) > 1:
            self._end(number, room, "the ranks of the decode server want different tokens")
            return
        room.announced = True
        peers = self._peers[legs[0].peer].layout
        self._report("granted", number, *ranges.pop(), peers.values)

    def _read(self, number: int, room: Room, legs: list[Leg]) -> bool:
        """Reads the next piece for every leg, and begins its writes; False if a window is full."""
        windows = [self._peers[leg.peer].window for leg in legs]
        for window in windows:
            if window is None or not window.has_room():
                return False
        end, places, _ = room.staged.popleft()
        for leg, window in zip(legs, windows):
            assert window is not None
            part, slot = self._peers[leg.peer].part, window.free.pop()
            size = len(places) * part.bytes_of(self._rows)
            bytes_ = window.rows(slot, size)
            part.read_into(self._rows, places, bytes_)
            try:
                write = window.write(self._transport, leg.peer, slot, size)
            except TransportError as error:
                window.free.append(slot)
                self._send_all(number, leg, leg.state.fail(str(error)))
                continue
            leg.pieces.append(Piece(end, slot, size, wire.checksum(bytes_), write))
        self._report("sent", number, end)  # read by all: the places are free
        return True

    def _notify(self, number: int, room: Room, leg: Leg) -> None:
        """Sends the notifications of writes that have ended, in order."""
        for piece in leg.pieces:
            if piece.write is None:
                continue
            try:
                if not piece.write.poll():
                    return
            except TransportError as error:
                piece.write = None
                self._send_all(number, leg, leg.state.fail(str(error)))
                return
            piece.write = None
            if leg.state.state is not State.SENDING:
                return
            for name, begin, end in leg.state.data(piece.end):
                self._send_to(leg.peer, [name, number, leg.attempt, begin, end, piece.slot, piece.checksum])
        if room.all_staged and not room.staged:
            self._send_all(number, leg, leg.state.done())

    def _check_deadline(self, number: int, room: Room) -> None:
        age = time.monotonic() - room.began
        if room.over is not None:
            if room.has_met or age > 2 * wire.TRANSFER_SECONDS:
                del self._rooms[number]
        elif not room.has_met and age > wire.MEET_SECONDS:
            what = "a request" if room.digest is None else "the decode server's part"
            self._end(number, room, f"{what} did not arrive in {wire.MEET_SECONDS:g} s")
        elif age > wire.TRANSFER_SECONDS:
            self._end(number, room, "the deadline has passed")

    def _end(self, number: int, room: Room, reason: str) -> None:
        """Releases everything that the transfer holds."""
        room.over = reason
        room.staged.clear()
        for leg in room.legs.values():
            self._send_all(number, leg, leg.state.fail(reason))
            consumer = self._peers.get(leg.peer)
            for piece in leg.pieces:
                if consumer is not None:
                    self._give(consumer, piece)
        room.legs.clear()
        if room.digest is not None:  # otherwise its request is answered when it arrives
            self._report("ended", number, reason)

    def _give(self, consumer: Consumer, piece: Piece) -> None:
        if consumer.window is not None:
            consumer.window.give(piece.slot, piece.write)

    def _send_to(self, peer: bytes, message: list[Any]) -> None:
        self._deliver(peer, [wire.encode(message)])

    def _deliver(self, peer: bytes, frames: list[Any]) -> None:
        try:
            self._socket.send_multipart([peer, *frames], copy=False)
        except zmq.ZMQError:
            self._lose(peer, "its connection is closed")

    def _beat(self, now: float) -> None:
        for peer, consumer in list(self._peers.items()):
            if now - consumer.heard > wire.SILENCE_SECONDS:
                self._lose(peer, f"no message for {wire.SILENCE_SECONDS:g} s")
            else:
                self._send_to(peer, ["beat"])

    def _lose(self, peer: bytes, reason: str) -> None:
        consumer = self._peers.get(peer)
        legs = [room.legs[peer] for room in self._rooms.values() if peer in room.legs]
        if consumer is not None and consumer.window is not None:
            name = f"rank {consumer.rank} of the decode server at {consumer.host}"
            logger.warning("KV transfers: %s is lost: %s; transfers ended: %d", name, reason, len(legs))
        for leg in legs:
            leg.state.lost(reason)
        if consumer is not None:
            del self._peers[peer]
            self._transport.forget(peer)
            self._close_window(consumer)

    def _close_window(self, consumer: Consumer) -> None:
        if consumer.window is not None:
            self._transport.release(consumer.window.memory)
            consumer.window = None
