"""The thread of a decode server that receives KV into places of its tier."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from moe_engine.core.kv_transfer import wire
from moe_engine.core.kv_transfer.rows import StagedRows
from moe_engine.processes.watched_thread import start_watched
from moe_engine.processes.zmq_sockets import HANDSHAKE_FAILED, SECRET_HINT, JobKeys, connect
from moe_engine.scheduler.transfer_link import TransferLink
from moe_engine.scheduler.transfer_state import Message, Receiving, State

POLL_MS = 200
CONNECT_SECONDS = 5.0
logger = logging.getLogger("moe_engine")


@dataclass
class Transfer:
    state: Receiving
    attempt: int
    places: list[int]
    began: float = field(default_factory=time.monotonic)


class Peer:
    """A prefill server: its connection and the transfers from it. Dropped when the connection ends."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: JobKeys | None, schema: dict[str, str]
    ) -> None:
        self.address = address
        self.transfers: dict[int, Transfer] = {}
        self.heard = time.monotonic()
        self.is_welcome = False
        self.socket = wire.dealer(context)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | HANDSHAKE_FAILED
        )
        connect(self.socket, address, keys)
        self.send(["hello", schema])

    def send(self, message: list[object]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the monitor reports the loss
            self.socket.send(wire.encode(message), flags=zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


class DecodeAgent:
    """
    Args:
        rows: the places of the tier.
        wake_core: ends a wait of the core's loop.
    """

    def __init__(
        self,
        link: TransferLink,
        rows: StagedRows,
        schema: dict[str, str],
        default_port: int,
        keys: JobKeys | None,
        wake_core: Callable[[], None],
    ) -> None:
        self._link, self._rows, self._schema = link, rows, schema
        self._default_port, self._keys, self._wake_core = default_port, keys, wake_core
        self._context = zmq.Context()
        self._peers: dict[str, Peer] = {}
        self._rooms: dict[int, Peer] = {}
        self._attempts = itertools.count(1)
        self._inner, self._waker = wire.wakeup(self._context)
        link.wake = lambda: self._waker.send(b"")
        self._closing = False
        self._thread = start_watched("KV transfers", self._run, lambda message: None)

    def close(self) -> None:
        self._closing = True
        self._waker.send(b"")
        self._thread.join(timeout=5)

    def _run(self) -> None:
        beat = time.monotonic()
        try:
            while not self._closing:
                poller = zmq.Poller()
                for socket in (self._inner, *(s for p in self._peers.values() for s in (p.socket, p.monitor))):
                    poller.register(socket, zmq.POLLIN)
                poller.poll(POLL_MS)
                while self._inner.poll(0):
                    self._inner.recv()
                while self._link.commands:
                    self._command(*self._link.commands.popleft())
                for peer in list(self._peers.values()):
                    self._serve(peer)
                if time.monotonic() - beat > wire.BEAT_SECONDS:
                    beat = time.monotonic()
                    for peer in list(self._peers.values()):
                        self._beat(peer, beat)
        finally:
            for peer in list(self._peers.values()):
                self._lose(peer, "the decode server stops")
            self._context.destroy(linger=200)

    def _command(self, name: str, room: int, *values: object) -> None:
        if name == "want":
            self._want(room, *values)  # type: ignore[arg-type]
        elif (peer := self._rooms.get(room)) is not None:
            transfer = peer.transfers[room]
            self._send(peer, room, transfer, transfer.state.fail("the request ended"))
            self._finish(peer, room, transfer)

    def _want(self, room: int, host: str, port: int, digest: bytes, begin: int, limit: int, places: list[int]) -> None:
        host = f"[{host}]" if ":" in host else host
        address = f"tcp://{host}:{port or self._default_port}"
        peer = self._peers.get(address)
        if peer is None:
            try:
                peer = self._peers[address] = Peer(self._context, address, self._keys, self._schema)
            except zmq.ZMQError as error:
                self._report("failed", room, f"{address}: {error}")
                return
        transfer = Transfer(Receiving(digest, begin, limit), next(self._attempts), places)
        self._send(peer, room, transfer, transfer.state.open())
        if places:
            peer.transfers[room], self._rooms[room] = transfer, peer
        else:  # the prompt is cached here
            self._send(peer, room, transfer, transfer.state.fail("cached"))

    def _serve(self, peer: Peer) -> None:
        while peer.socket.poll(0):
            frames = peer.socket.recv_multipart(copy=False)
            peer.heard = time.monotonic()
            try:
                name, *values = wire.decode(bytes(frames[0].buffer))
            except (msgspec.MsgspecError, ValueError):
                continue
            if name == "welcome":
                peer.is_welcome = True
            elif name == "refused":
                self._lose(peer, f"{peer.address} refuses: {values[0]}")
                return
            elif name in ("data", "done", "nack"):
                room, attempt, *rest = values
                transfer = peer.transfers.get(room)
                if transfer is not None and transfer.attempt == attempt:
                    self._handle(peer, room, transfer, name, rest, frames[1].buffer if name == "data" else b"")
        while peer.monitor.poll(0):
            event = recv_monitor_message(peer.monitor)["event"]
            if event & HANDSHAKE_FAILED:
                self._lose(peer, f"{peer.address}: handshake failed; {SECRET_HINT}")
            else:
                self._lose(peer, f"{peer.address}: no connection")
            return

    def _handle(
        self, peer: Peer, room: int, transfer: Transfer, name: str, values: list[int], payload: bytes | memoryview
    ) -> None:
        state = transfer.state
        if name == "data":
            begin, end, expected = values
            rows = np.frombuffer(bytearray(payload), np.uint8)
            if rows.size != (end - begin) * self._rows.row_bytes or wire.checksum(rows) != expected:
                answers = state.fail("the bytes of a piece have another size or checksum than the sender's")
            else:
                if state.accepts(begin, end):
                    places = transfer.places[begin - state.begin : end - state.begin]
                    self._rows.write(places, rows.reshape(end - begin, -1))
                answers = state.handle(("data", begin, end))
        else:
            answers = state.handle((name, *values))
        self._send(peer, room, transfer, answers)
        self._finish(peer, room, transfer)

    def _finish(self, peer: Peer, room: int, transfer: Transfer) -> None:
        state = transfer.state
        if state.state is State.RECEIVING:
            return
        del peer.transfers[room], self._rooms[room]
        if state.state is State.FILLED:
            self._report("filled", room, state.end)
        else:
            self._report("failed", room, state.reason)

    def _send(self, peer: Peer, room: int, transfer: Transfer, messages: list[Message]) -> None:
        for name, *values in messages:
            peer.send([name, room, transfer.attempt, *values])

    def _beat(self, peer: Peer, now: float) -> None:
        limit = wire.SILENCE_SECONDS if peer.is_welcome else CONNECT_SECONDS
        if now - peer.heard > limit:
            self._lose(peer, f"{peer.address}: no message for {limit:g} s")
            return
        peer.send(["beat"])
        for room, transfer in list(peer.transfers.items()):
            if now - transfer.began > wire.TRANSFER_SECONDS:
                self._send(peer, room, transfer, transfer.state.fail("the deadline has passed"))
                self._finish(peer, room, transfer)

    def _lose(self, peer: Peer, reason: str) -> None:
        """The connection has ended: so do its transfers. The next request connects again."""
        if self._peers.get(peer.address) is peer:
            del self._peers[peer.address]
        for room, transfer in list(peer.transfers.items()):
            transfer.state.lost(reason)
            self._finish(peer, room, transfer)
        peer.close()

    def _report(self, *values: object) -> None:
        self._link.reports.append(values)
        self._wake_core()
