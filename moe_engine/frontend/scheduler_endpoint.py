"""A scheduler, as the frontend sends to it: messages of one turn of the event loop leave together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from moe_engine.core import messages
from moe_engine.core.messages import AddRequest
from moe_engine.core.shared_status import SharedStatus
from moe_engine.frontend.client_api import Health
from moe_engine.frontend.core_process import CoreProcess
from moe_engine.processes.zmq_sockets import connect


@dataclass
class SchedulerEndpoint:
    """The scheduler of a core process, or of an attention group behind it. `to` opens the socket."""

    core: CoreProcess
    group: int
    to_core: zmq.Socket[bytes]
    status: SharedStatus
    lost: str | None = None
    """Cause of the group's loss, if its core continues without it."""
    begun: list[AddRequest] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Requests that began in this turn of the event loop, and ids of those whose readers left: not yet sent."""

    @classmethod
    def to(cls, core: CoreProcess, group: int, address: str, status: SharedStatus) -> SchedulerEndpoint:
        socket = zmq.Context(zmq.asyncio.Context.instance()).socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        connect(socket, address, core.keys)
        return cls(core, group, socket, status)

    @property
    def dead(self) -> str | None:
        """Why it cannot receive requests, or None."""
        return self.core.dead or self.lost

    def add(self, request: AddRequest) -> None:
        """Sends a request, in one message with all others that begin in this turn of the event loop: else an idle
        scheduler would compute the first one of a batch alone, and read the weights once more for the others."""
        self._end_turn_later()
        self.begun.append(request)

    def leave(self, rid: str) -> None:
        """Aborts a request without a reader, in one message with all others that lose theirs in this turn of the event
        loop: the scheduler ends them together, and admits none of them to the row of another."""
        self._end_turn_later()
        self.left.append(rid)

    def send(self, message: messages.Message) -> None:
        self._send_begun()
        self._send(message)

    def end_turn(self) -> None:
        """Sends what this turn of the event loop has collected."""
        self._send_begun()
        left, self.left = self.left, []
        if left:
            self._send(messages.AbortRequest(left, reason="client disconnected"))

    def _end_turn_later(self) -> None:
        if not self.begun and not self.left:
            asyncio.get_running_loop().call_soon(self.end_turn)

    def _send_begun(self) -> None:
        begun, self.begun = self.begun, []
        if begun:
            self._send(begun[0] if len(begun) == 1 else messages.AddRequests(begun))

    def _send(self, message: messages.Message) -> None:
        if not self.dead and not self.to_core.closed:
            # A PUSH socket without a high-water mark never blocks. asyncio's sockets create a future for each message.
            self.to_core.send(messages.encode(message), zmq.NOBLOCK)

    def health(self) -> Health:
        status = self.status.read()
        return Health(
            alive=self.dead is None,
            ready=status.ready,
            last_step=status.step,
            last_step_age=status.step_age,
            silence=status.silence,
            oldest_queued_age=0.0 if self.dead else status.oldest_queued_age,
            num_running=0 if self.dead else status.num_running,
            num_waiting=0 if self.dead else status.num_waiting,
            num_used_tokens=0 if self.dead else status.num_used_tokens,
            dead=self.dead,
        )
