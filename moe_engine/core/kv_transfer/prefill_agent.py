"""The thread of a prefill server that sends KV: reads staged places, answers decode servers."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zmq

from moe_engine.core.kv_transfer import wire
from moe_engine.core.kv_transfer.rows import StagedRows
from moe_engine.core.kv_transfer.schema import difference
from moe_engine.processes.watched_thread import start_watched
from moe_engine.processes.zmq_sockets import JobKeys, bind
from moe_engine.scheduler.transfer_link import TransferLink
from moe_engine.scheduler.transfer_state import Message, Sending, State

logger = logging.getLogger("moe_engine")

POLL_MS = 200
STORE_POLL_MS = 1


@dataclass
class Transfer:
    """`pieces`: (end, places, number of their copies), not sent yet."""

    state: Sending = field(default_factory=Sending)
    began: float = field(default_factory=time.monotonic)
    peer: bytes = b""
    attempt: int = 0
    pieces: deque[tuple[int, list[int], int]] = field(default_factory=deque)
    all_staged: bool = False
    announced: bool = False


class PrefillAgent:
    """
    Args:
        rows: the places of the tier.
        wake_core: ends a wait of the core's loop.

    Raises:
        ConfigError: the port cannot be bound.
    """

    def __init__(
        self,
        link: TransferLink,
        rows: StagedRows,
        schema: dict[str, str],
        address: str,
        keys: JobKeys | None,
        wake_core: Callable[[], None],
    ) -> None:
        self._link, self._rows, self._schema = link, rows, schema
        self._wake_core = wake_core
        self._transfers: dict[int, Transfer] = {}
        self._peers: dict[bytes, float] = {}
        self._context = zmq.Context()
        self._socket = wire.router(self._context)
        self.address = bind(self._socket, address, keys, "--disaggregation-bootstrap-port")
        self._inner, self._waker = wire.wakeup(self._context)
        link.wake = lambda: self._waker.send(b"")
        self._closing = False
        self._thread = start_watched("KV transfers", self._run, lambda message: None)

    def close(self) -> None:
        self._closing = True
        self._waker.send(b"")
        self._thread.join(timeout=5)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._inner, zmq.POLLIN)
        beat = time.monotonic()
        try:
            while not self._closing:
                waits = any(t.pieces and t.state.may_send for t in self._transfers.values())
                poller.poll(STORE_POLL_MS if waits else POLL_MS)
                while self._inner.poll(0):
                    self._inner.recv()
                while self._socket.poll(0):
                    self._receive()
                while self._link.commands:
                    self._command(*self._link.commands.popleft())
                for room, transfer in list(self._transfers.items()):
                    self._advance(room, transfer)
                if time.monotonic() - beat > wire.BEAT_SECONDS:
                    beat = time.monotonic()
                    self._beat(beat)
        finally:
            for room, transfer in self._transfers.items():
                self._send(room, transfer, transfer.state.fail("the prefill server stops"))
            self._context.destroy(linger=500)

    # -- messages

    def _receive(self) -> None:
        peer, *frames = self._socket.recv_multipart()
        try:
            name, *values = wire.decode(frames[0])
        except (msgspec.MsgspecError, ValueError, IndexError):
            return
        self._peers[peer] = time.monotonic()
        if name == "hello":
            reason = difference(self._schema, values[0])
            answer = ["refused", reason] if reason is not None else ["welcome"]
            self._deliver(peer, [wire.encode(answer)])
        elif name in ("want", "got", "cancel"):
            room, attempt, *rest = values
            self._handle(peer, room, attempt, (name, *rest))

    def _handle(self, peer: bytes, room: int, attempt: int, message: Message) -> None:
        transfer = self._transfers.get(room)
        if message[0] == "want":
            if transfer is None:
                transfer = self._transfers[room] = Transfer()
            if transfer.state.wanted is not None:
                self._deliver(peer, [wire.encode(["nack", room, attempt, "another request has the same room"])])
                return
            transfer.peer, transfer.attempt = peer, attempt
        if transfer is None or transfer.peer != peer or transfer.attempt != attempt:
            return  # of an ended transfer
        self._send(room, transfer, transfer.state.handle(message))

    def _command(self, name: str, room: int, *values: object) -> None:
        transfer = self._transfers.get(room)
        if name == "offer":
            if transfer is None:
                transfer = self._transfers[room] = Transfer()
            self._send(room, transfer, transfer.state.offer(values[0]))  # type: ignore[arg-type]
        elif transfer is None:
            return
        elif name == "send":
            transfer.pieces.append(values)  # type: ignore[arg-type]
        elif name == "done":
            transfer.all_staged = True
        else:
            self._send(room, transfer, transfer.state.fail(str(values[0])))

    # -- transfers

    def _advance(self, room: int, transfer: Transfer) -> None:
        state = transfer.state
        if state.state is State.SENDING and not transfer.announced:
            transfer.announced = True
            self._report("granted", room, state.sent, state.limit)
        while transfer.pieces and state.may_send and transfer.pieces[0][2] <= self._rows.stored:
            end, places, _ = transfer.pieces.popleft()
            payload = self._rows.read(places)  # a copy: the places are free afterwards
            self._send(room, transfer, state.data(end), payload)
            self._report("sent", room, end)
        if transfer.all_staged and not transfer.pieces:
            self._send(room, transfer, state.done())
        limit = wire.MEET_SECONDS if state.state is State.MEETING else wire.TRANSFER_SECONDS
        if time.monotonic() - transfer.began > limit:
            what = "a request" if state.digest is None else "the decode server's part"
            reason = (
                f"{what} did not arrive in {limit:g} s" if limit == wire.MEET_SECONDS else "the deadline has passed"
            )
            self._send(room, transfer, state.fail(reason))
        if state.state is State.ENDED:
            del self._transfers[room]
            self._report("ended", room, state.reason)

    def _send(self, room: int, transfer: Transfer, messages: list[Message], payload: np.ndarray | None = None) -> None:
        for name, *values in messages:
            frames: list[Any] = [wire.encode([name, room, transfer.attempt, *values])]
            if payload is not None and name == "data":
                frames = [wire.encode([name, room, transfer.attempt, *values, wire.checksum(payload)]), payload]
            self._deliver(transfer.peer, frames)

    def _deliver(self, peer: bytes, frames: list[Any]) -> None:
        try:
            self._socket.send_multipart([peer, *frames], copy=False)
        except zmq.ZMQError:
            self._lost(peer, "the decode server is gone")

    def _beat(self, now: float) -> None:
        for peer, heard in list(self._peers.items()):
            if now - heard > wire.SILENCE_SECONDS:
                self._lost(peer, f"no message of the decode server for {wire.SILENCE_SECONDS:g} s")
            else:
                self._deliver(peer, [wire.encode(["beat"])])

    def _lost(self, peer: bytes, reason: str) -> None:
        self._peers.pop(peer, None)
        for transfer in self._transfers.values():
            if transfer.peer == peer:
                transfer.state.lost(reason)

    def _report(self, *values: object) -> None:
        self._link.reports.append(values)
        self._wake_core()
