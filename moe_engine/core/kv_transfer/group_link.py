"""The transfers of an attention group with several ranks: the leader's scheduler commands the threads of all ranks.

The leader binds a socket, at which the followers join. Commands go to every rank, reports come back and are joined
(`joint.JointTransfers`). A group of one rank needs no link.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from moe_engine.core.kv_transfer import wire
from moe_engine.core.kv_transfer.joint import JointTransfers
from moe_engine.core.kv_transfer.layout import Layout
from moe_engine.core.kv_transfer.thread import TransferThread
from moe_engine.processes.zmq_sockets import JobKeys, bind, connect
from moe_engine.scheduler.transfer_link import Command, TransferLink

JOIN_SECONDS = 120.0


class GroupLink(TransferThread):
    """The leader's side.

    Args:
        link: of the scheduler.
        sends: of a prefill server.
        address: to bind.

    `own` is the link of the leader's own transfer thread, and `wake` its `wake_core`.
    """

    def __init__(
        self,
        link: TransferLink,
        layout: Layout,
        sends: bool,
        address: str,
        keys: JobKeys | None,
        wake_core: Callable[[], None],
    ) -> None:
        super().__init__(link, wake_core)
        self.own = TransferLink()
        self._joint = JointTransfers(layout, sends)
        self._waiting: dict[int, list[Command]] = {rank: [] for rank in range(1, layout.num_ranks)}
        """Commands for followers that have not joined."""
        self._began = time.monotonic()
        self._socket = wire.router(self._context)
        self.address = bind(self._socket, address, keys)
        own_waker = self._context.socket(zmq.PUSH)  # a socket for each thread
        own_waker.connect("inproc://wake")
        self.wake: Callable[[], None] = lambda: own_waker.send(b"")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._inner, zmq.POLLIN)
        self._start()

    def _is_busy(self) -> bool:
        return False

    def _wait(self, milliseconds: int) -> None:
        self._poller.poll(milliseconds)

    def _turn(self) -> None:
        while self._socket.poll(0):
            identity, frame = self._socket.recv_multipart()
            self._receive(int(identity), *wire.decode(frame))
        while self.own.reports:
            self._join(0, self.own.reports.popleft())
        while self._link.commands:
            for rank, command in self._joint.command(self._link.commands.popleft()):
                self._forward(rank, command)
        if self.own.broken:
            self._broken(self.own.broken)
        if self._waiting and time.monotonic() - self._began > JOIN_SECONDS:
            self._broken(f"KV transfers: rank {min(self._waiting)} of the group did not join in {JOIN_SECONDS:g} s")

    def _receive(self, rank: int, name: str, *values: Any) -> None:
        if name == "join":
            for command in self._waiting.pop(rank, []):
                self._forward(rank, command)
        elif name == "broken":
            self._broken(values[0])
        else:
            self._join(rank, (name, *values))

    def _join(self, rank: int, report: Command) -> None:
        reports, commands = self._joint.report(rank, report)
        for other, command in commands:
            self._forward(other, command)
        for joined in reports:
            self._report(*joined)

    def _forward(self, rank: int, command: Command) -> None:
        if rank == 0:
            self.own.command(*command)
        elif rank in self._waiting:
            self._waiting[rank].append(command)
        else:
            self._socket.send_multipart([str(rank).encode(), wire.encode(command)])

    def _leave(self) -> None: ...


class FollowerLink(TransferThread):
    """A follower's side. `own` is the link of its transfer thread, and `wake` that thread's `wake_core`."""

    def __init__(self, rank: int, address: str, keys: JobKeys | None) -> None:
        super().__init__(TransferLink(), lambda: None)
        self.own = TransferLink()
        self.wake: Callable[[], None] = lambda: self._waker.send(b"")
        self._socket = wire.dealer(self._context)
        self._socket.setsockopt(zmq.IDENTITY, str(rank).encode())
        connect(self._socket, address, keys)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._inner, zmq.POLLIN)
        self._reported = False

    def start(self) -> None:
        """After the transfer thread has started."""
        self._send("join")
        self._start()

    def _is_busy(self) -> bool:
        return False

    def _wait(self, milliseconds: int) -> None:
        self._poller.poll(milliseconds)

    def _turn(self) -> None:
        while self._socket.poll(0):
            self.own.command(*wire.decode(self._socket.recv()))
        while self.own.reports:
            self._send(*self.own.reports.popleft())
        if self.own.broken and not self._reported:
            self._reported = True
            self._send("broken", self.own.broken)

    def _send(self, *values: Any) -> None:
        self._socket.send(msgspec.msgpack.encode(values))

    def _leave(self) -> None: ...
