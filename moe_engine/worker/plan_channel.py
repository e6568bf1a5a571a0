"""Plans on their way from the leader of a rank group to its followers: one message a step, sent once for all of them.

The leader publishes, followers subscribe; nothing is ever dropped for being slow, and messages are numbered, so that
one lost with a connection is noticed and never skipped.
"""

from __future__ import annotations

import time

import msgspec
import zmq

from moe_engine.errors import EngineDeadError
from moe_engine.types import StepPlan


class Step(msgspec.Struct, tag="step", array_like=True):
    """A plan to run. `sequence` counts the steps of a channel from 1."""

    sequence: int
    plan: StepPlan


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """The orderly end, after the steps sent so far; `sequence` is the last one's."""

    sequence: int


class PlanSender:
    """The leader's end; of one thread at a time.

    Args:
        address: to bind, ``ipc://PATH`` or ``tcp://IP:*``; `address` afterwards is the one to connect to.
    """

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # every subscription is reported, so that they can be counted
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.bind(address)
        self.address: str = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]
        self._encode = msgspec.msgpack.Encoder().encode
        self._subscribed = 0
        self.sequence = 0

    def wait_subscribed(self, count: int, timeout: float) -> bool:
        """True as soon as `count` followers receive, False after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._subscribed < count:
            if not self._socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
                return False
            self._subscribed += self._socket.recv()[:1] == b"\1"
        return True

    def send(self, plan: StepPlan) -> int:
        """Returns at once with the step's sequence number."""
        self.sequence += 1
        self._socket.send(self._encode(Step(self.sequence, plan)))
        return self.sequence

    def stop(self) -> None:
        self._socket.send(self._encode(Stop(self.sequence)))

    def close(self) -> None:
        """Sends what is left, for a second at most."""
        self._socket.close(1000)


class PlanReceiver:
    """A follower's end; of one thread."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(address)
        self._decode = msgspec.msgpack.Decoder(Step | Stop).decode
        self._sequence = 0

    def receive(self, timeout: float) -> Step | Stop | None:
        """The next message, or None after `timeout` seconds without one.

        Raises:
            EngineDeadError: a plan was lost on the way; this rank cannot go on with the others.
        """
        self._socket.setsockopt(zmq.RCVTIMEO, int(timeout * 1000))  # one wait; `poll` before `recv` makes it two
        try:
            message = self._decode(self._socket.recv())
        except zmq.Again:
            return None
        expected = self._sequence + isinstance(message, Step)
        if message.sequence != expected:
            raise EngineDeadError(
                f"a plan was lost between the ranks: step {message.sequence} of the channel came where {expected} was "
                "due; the connection to the leader broke for a while"
            )
        self._sequence = message.sequence
        return message

    def close(self) -> None:
        self._socket.close(0)
