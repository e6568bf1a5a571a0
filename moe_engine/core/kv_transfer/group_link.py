"""The transfers of an attention group with several ranks: the leader's scheduler commands the threads of all ranks.

The leader binds a socket, at which the followers join. Commands go to every rank, reports come back and are joined
(`joint.JointTransfers`). A group of one rank needs no link.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zmq

from moe_engine.core.kv_transfer import wire
from moe_engine.core.kv_transfer.joint import JointTransfers
from moe_engine.core.kv_transfer.layout import Layout
from moe_engine.core.kv_transfer.thread import TransferThread
from moe_engine.processes.zmq_sockets import JobKeys, bind, connect
from moe_engine.scheduler.tiers.transfer_link import Command, TransferLink

JOIN_SECONDS = 120.0
LOST_SECONDS = 5.0
"""Time for the failure detector to name a follower that this link has lost."""


class RankLink(TransferThread):
    """A rank's side of the link. `own` is the link of the rank's transfer thread, and `wake` that thread's
    `wake_core`."""

    def __init__(
        self,
        link: TransferLink,
        wake_core: Callable[[], None],
        new_socket: Callable[[zmq.Context[zmq.Socket[bytes]]], zmq.Socket[bytes]],
    ) -> None:
        super().__init__(link, wake_core)
        self.own = TransferLink()
        waker = self._new_waker()
        self.wake: Callable[[], None] = lambda: waker.send(b"")
        self._socket = new_socket(self._context)
        self._poller.register(self._socket, zmq.POLLIN)
        self._is_broken = False

    def _turn(self) -> None:
        while self._socket.poll(0):
            self._receive(self._socket.recv_multipart())
        while self.own.reports:
            self._of_own(*self.own.reports.popleft())
        if self.own.broken and not self._is_broken:
            self._is_broken = True
            self._of_own("broken", self.own.broken)

    # -- of the side

    def _receive(self, frames: list[bytes]) -> None:
        """A message of the other side."""
        raise NotImplementedError

    def _of_own(self, *report: Any) -> None:
        """A report of this rank's transfer thread; ``broken`` with its reason: the thread has ended."""
        raise NotImplementedError


class GroupLink(RankLink):
    """The leader's side.

    Args:
        link: of the scheduler.
        sends: of a prefill server.
        address: to bind.
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
        super().__init__(link, wake_core, wire.router)
        self._joint = JointTransfers(layout, sends)
        self._waiting: dict[int, list[Command]] = {rank: [] for rank in range(1, layout.num_ranks)}
        """Commands for followers that have not joined."""
        self._lost: dict[int, float] = {}
        """When a command first failed to reach a follower."""
        self._began = time.monotonic()
        self.address = bind(self._socket, address, keys)
        self._start()

    def _turn(self) -> None:
        super()._turn()
        while self._link.commands:
            for rank, command in self._joint.command(self._link.commands.popleft()):
                self._forward(rank, command)
        if self._waiting and time.monotonic() - self._began > JOIN_SECONDS:
            self._broken(f"KV transfers: rank {min(self._waiting)} of the group did not join in {JOIN_SECONDS:g} s")
        for rank, since in self._lost.items():
            if time.monotonic() - since > LOST_SECONDS:
                self._broken(f"KV transfers: the connection to rank {rank} of the group is lost")

    def _receive(self, frames: list[bytes]) -> None:
        self._of_rank(int(frames[0]), *wire.decode(frames[1]))

    def _of_own(self, *report: Any) -> None:
        self._of_rank(0, *report)

    def _of_rank(self, rank: int, name: str, *values: Any) -> None:
        if name == "join":
            for command in self._waiting.pop(rank, []):
                self._forward(rank, command)
        elif name == "broken":
            self._broken(values[0])
        else:
            reports, commands = self._joint.report(rank, (name, *values))
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
            try:
                self._socket.send_multipart([str(rank).encode(), wire.encode(command)])
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._lost.setdefault(rank, time.monotonic())


class FollowerLink(RankLink):
    """A follower's side."""

    def __init__(self, rank: int, address: str, keys: JobKeys | None) -> None:
        super().__init__(TransferLink(), lambda: None, wire.dealer)
        self._socket.setsockopt(zmq.IDENTITY, str(rank).encode())
        connect(self._socket, address, keys)

    def start(self) -> None:
        """After the transfer thread has started."""
        self._of_own("join")
        self._start()

    def _receive(self, frames: list[bytes]) -> None:
        self.own.command(*wire.decode(frames[0]))

    def _of_own(self, *report: Any) -> None:
        self._socket.send(wire.encode(report))
