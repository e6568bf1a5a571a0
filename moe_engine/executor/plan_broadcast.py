"""Plans on their way from the leader of a rank group to its followers: one message a step, sent once for all of them.

The leader publishes, followers subscribe; nothing is ever dropped for being slow, and messages are numbered, so that
one lost with a connection is noticed and never skipped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec
import zmq

from moe_engine.errors import EngineDeadError
from moe_engine.processes.frames import FrameReader
from moe_engine.processes.zmq_sockets import JobKeys, bind, connect
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
        keys: of sockets between nodes.
    """

    def __init__(self, address: str, keys: JobKeys | None = None) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self.address = bind(self._socket, address, keys)
        self._encode = msgspec.msgpack.Encoder().encode
        self._subscribed: set[bytes] = set()
        self.sequence = 0

    def wait_subscribed(self, names: Iterable[str], timeout: float) -> bool:
        """True as soon as followers of these names receive, False after `timeout` seconds. Others do not count."""
        expected, deadline = {b"\1" + name.encode() for name in names}, time.monotonic() + timeout
        while not expected <= self._subscribed:
            left = deadline - time.monotonic()
            if left <= 0 or not self._socket.poll(int(1000 * left)):
                return False
            frames = self._socket.recv_multipart()
            if frames[0] in expected:
                self._subscribed.add(frames[0])
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
    """A follower's end; of one thread.

    Args:
        name: of the rank, for `PlanSender.wait_subscribed`; also a topic, of which no plan takes notice.
    """

    def __init__(self, address: str, name: str = "", keys: JobKeys | None = None) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        for topic in ("", name):
            self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        connect(self._socket, address, keys)
        self._reader = FrameReader("plans of the leader", msgspec.msgpack.Decoder(Step | Stop).decode)
        self._sequence = 0

    def receive(self, timeout: float) -> Step | Stop | None:
        """The next message, or None after `timeout` seconds without one or after a frame that was dropped.

        Raises:
            EngineDeadError: a plan was lost on the way; this rank cannot go on with the others.
        """
        self._socket.setsockopt(zmq.RCVTIMEO, int(timeout * 1000))  # one wait; `poll` before `recv` makes it two
        try:
            frames = self._socket.recv_multipart()
        except zmq.Again:
            return None
        if (message := self._reader.take(frames)) is None:
            return None  # the plan after a broken one is missed as lost
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
