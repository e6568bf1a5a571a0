"""Plans on their way from the leader of a rank group to its followers: one message a step, sent once for all of them.

The leader publishes, followers subscribe; nothing is ever dropped for being slow, and messages are numbered, so that one
lost with a connection is noticed and never skipped. `Alive` shows that the leader's process runs, plans or not.
"""

from __future__ import annotations

import threading
import time

import msgspec
import zmq

from moe_engine.errors import EngineDeadError
from moe_engine.types import StepPlan


class Step(msgspec.Struct, tag="step", array_like=True):
    """A plan to run. `sequence` counts the steps of a channel from 1."""

    sequence: int
    plan: StepPlan


class Alive(msgspec.Struct, tag="alive", array_like=True):
    """`sequence` of the last step sent."""

    sequence: int


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """The end: after the steps sent so far, or at once when there is a `reason`."""

    sequence: int
    reason: str = ""


FromLeader = Step | Alive | Stop


class PlanSender:
    """The leader's end. Safe to use from several threads.

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
        self._lock = threading.Lock()
        self._subscribed = 0
        self.sequence = 0

    def wait_subscribed(self, count: int, timeout: float) -> bool:
        """True as soon as `count` followers receive, False after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._subscribed < count:
            with self._lock:
                if self._socket.poll(0):
                    self._subscribed += self._socket.recv()[:1] == b"\1"
                    continue
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        return True

    def send(self, plan: StepPlan) -> int:
        """Returns at once with the step's sequence number."""
        with self._lock:
            self.sequence += 1
            self._socket.send(self._encode(Step(self.sequence, plan)))
            return self.sequence

    def alive(self) -> None:
        self._tell(Alive(self.sequence))

    def stop(self, reason: str = "") -> None:
        self._tell(Stop(self.sequence, reason))

    def _tell(self, message: Alive | Stop) -> None:
        with self._lock:
            if not self._socket.closed:
                self._socket.send(self._encode(message))

    def close(self) -> None:
        """Sends what is left, for a second at most."""
        with self._lock:
            self._socket.close(1000)


class PlanReceiver:
    """A follower's end; of one thread."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(address)
        self._decode = msgspec.msgpack.Decoder(FromLeader).decode
        self._sequence = 0

    def receive(self, timeout: float) -> FromLeader | None:
        """The next message, or None after `timeout` seconds without one.

        Raises:
            EngineDeadError: a plan was lost on the way; this rank cannot go on with the others.
        """
        if not self._socket.poll(int(timeout * 1000)):
            return None
        message = self._decode(self._socket.recv())
        expected = self._sequence + isinstance(message, Step)
        if message.sequence != expected and not (isinstance(message, Stop) and message.reason):
            raise EngineDeadError(
                f"a plan was lost between the ranks: step {message.sequence} of the channel came where {expected} was "
                "due; the connection to the leader broke for a while"
            )
        self._sequence = message.sequence
        return message

    def close(self) -> None:
        self._socket.close(0)
