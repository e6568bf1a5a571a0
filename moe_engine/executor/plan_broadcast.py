"""Plan channel from the leader of a rank group to its followers: one message per step, and one with its late
masks if it has masked rows, over XPUB/XSUB sockets.

Calls on all ranks are messages of the same channel, so every rank runs them between the same two steps; answers return
over it. No message is dropped because of a slow follower. Messages are numbered, so that one lost with a connection is
detected.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import zmq

from moe_engine.core.rank_calls import RankAnswer
from moe_engine.errors import EngineDeadError
from moe_engine.processes.frames import FrameReader
from moe_engine.processes.zmq_sockets import JobKeys, bind, connect
from moe_engine.types import StepPlan
from moe_engine.types.token_masks import StepMasks

SUBSCRIPTION = (b"\0", b"\1")
"""First byte of XPUB's messages about subscriptions."""


class Step(msgspec.Struct, tag="step", array_like=True):
    """A plan to run. `sequence` counts the channel's steps from 1."""

    sequence: int
    plan: StepPlan


class Run(msgspec.Struct, tag="run", array_like=True):
    """A call of `method` (`worker.rank_methods`) after step `sequence`, answered by `Answer` with the same id."""

    sequence: int
    id: int
    method: str
    args: dict[str, Any]


KV_REPORT = -1
"""`Answer.id` of a report on the storage tier, which answers no call: its value is a list (id, pages, ended)."""


class Answer(msgspec.Struct, tag="answer", array_like=True):
    """A follower's answer."""

    id: int
    answer: RankAnswer


class Masks(msgspec.Struct, tag="masks", array_like=True):
    """Masks of the last step sent; `sequence` is that of the step."""

    sequence: int
    masks: StepMasks


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """Orderly stop after the steps sent so far; `sequence` is that of the last step."""

    sequence: int


class PlanSender:
    """Leader side. Not thread-safe.

    Args:
        address: bind address, ``ipc://PATH`` or ``tcp://IP:*``; the attribute `address` is the one to connect to.
        keys: CURVE keys of sockets between nodes.
    """

    def __init__(self, address: str, keys: JobKeys | None = None) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self.address = bind(self._socket, address, keys)
        self._encode = msgspec.msgpack.Encoder().encode
        self._reader = FrameReader("answers of the followers", msgspec.msgpack.Decoder(Answer).decode)
        self._subscribed: set[bytes] = set()
        self.sequence = 0

    def wait_subscribed(self, names: Iterable[str], timeout: float) -> bool:
        """True once followers with all these names have subscribed, False after `timeout` seconds."""
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
        """Sends without blocking; returns the step's sequence number."""
        self.sequence += 1
        self._socket.send(self._encode(Step(self.sequence, plan)))
        return self.sequence

    def call(self, number: int, method: str, args: Mapping[str, Any]) -> None:
        """Sends a call, without blocking; `answers` has its answers."""
        self._socket.send(self._encode(Run(self.sequence, number, method, dict(args))))

    def answers(self) -> Iterator[Answer]:
        """The answers that have arrived, without waiting."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if frames[0][:1] in SUBSCRIPTION:
                continue
            if (answer := self._reader.take(frames)) is not None:
                yield answer

    def send_masks(self, masks: StepMasks) -> None:
        """Sends the masks of the last plan, which has `StepPlan.masked` rows."""
        self._socket.send(self._encode(Masks(self.sequence, masks)))

    def stop(self) -> None:
        self._socket.send(self._encode(Stop(self.sequence)))

    def close(self) -> None:
        """Flushes queued messages for up to a second."""
        self._socket.close(1000)


class PlanReceiver:
    """Follower side. Not thread-safe.

    Args:
        name: subscription name of the rank, for `PlanSender.wait_subscribed`; no plan is published under it.
    """

    def __init__(self, address: str, name: str, keys: JobKeys | None = None) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XSUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        connect(self._socket, address, keys)
        for topic in ("", name):
            self._socket.send(b"\1" + topic.encode())
        self._reader = FrameReader("plans of the leader", msgspec.msgpack.Decoder(Step | Masks | Run | Stop).decode)
        self._sequence = 0
        self._awaits_masks = False

    def receive(self, timeout: float) -> Step | Masks | Run | Stop | None:
        """The next message, or None after `timeout` seconds without one or after a dropped frame.

        Raises:
            EngineDeadError: a plan was lost; this rank can no longer follow the others.
        """
        self._socket.setsockopt(zmq.RCVTIMEO, int(timeout * 1000))  # one system call; `poll` before `recv` would be two
        try:
            frames = self._socket.recv_multipart()
        except zmq.Again:
            return None
        if (message := self._reader.take(frames)) is None:
            return None  # the next plan's sequence number reveals the loss
        expected = self._sequence + isinstance(message, Step)
        lost_masks = self._awaits_masks and isinstance(message, Step | Run)
        if message.sequence != expected or lost_masks:
            raise EngineDeadError(
                f"a plan was lost between the ranks: received step {message.sequence} of the channel, expected "
                f"{expected}; the connection to the leader was interrupted"
            )
        self._sequence = message.sequence
        self._awaits_masks = isinstance(message, Step) and bool(message.plan.masked)
        return message

    def answer(self, number: int, answer: RankAnswer) -> None:
        """Sends this rank's answer to a call."""
        self._socket.send(msgspec.msgpack.encode(Answer(number, answer)))

    def close(self) -> None:
        self._socket.close(0)
