"""Foreign, outdated and malformed frames end no receive loop: the group survives and work continues.

MOE_ENGINE_TEST_FRAMES frames are sent to each kind of socket (default 600; 20000 are 10^5 in total).
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from moe_engine.cluster.control_server import ControlServer
from moe_engine.cluster.failure_detector import FailureDetector
from moe_engine.cluster.heartbeat_client import HeartbeatClient
from moe_engine.core import messages as core_messages
from moe_engine.core.dp_sync import DPSync, StepExchange, StepFactsMessage
from moe_engine.core.transport import ZmqTransport
from moe_engine.executor import messages
from moe_engine.executor.options import DetectorLimits, RankGroupOptions
from moe_engine.executor.plan_broadcast import PlanReceiver, PlanSender, Run, Step
from moe_engine.executor.progress import Position
from moe_engine.types import StepFacts, StepPlan
from tests.distributed.ranks.strays import Strays, encode
from tests.waiting import until

NUM_FRAMES = int(os.environ.get("MOE_ENGINE_TEST_FRAMES", "600"))
SECONDS = 60.0
LIMITS = DetectorLimits(silent=30.0, start_silent=30.0)


def stranger(kind: int, address: str, identity: bytes = b"") -> zmq.Socket[bytes]:
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    if identity:
        made.setsockopt(zmq.IDENTITY, identity)
    made.connect(address)
    return made


class Group:
    """Rank 0's control channel and the link of rank 1, which is on node 1."""

    def __init__(self, address: str, options: RankGroupOptions | None = None) -> None:
        self.options = options or RankGroupOptions(
            2, lambda: None, num_nodes=2, leader_address="127.0.0.1:1", limits=LIMITS
        )
        self.detector = FailureDetector(self.options.places, LIMITS, Position, ("here", 1))
        self.statuses: list[tuple[int, list[float]]] = []
        self.control = ControlServer(address, self.options, self.detector, lambda *shown: self.statuses.append(shown))
        self.left: list[str] = []
        self.link = self._link(1)
        self.link.send(messages.Loaded(1, {}))
        self.detector.loaded(0, {})
        until(lambda: self.link.go.done(), "the rank is not ready")
        self.detector.arm()

    def _link(self, rank: int) -> HeartbeatClient:
        hello = messages.Hello(rank, "here", 100 + rank)
        beat = messages.Beat(rank, Position())
        return HeartbeatClient(
            self.control.address, f"rank{rank}", hello, lambda: beat, LIMITS, self.left.append, keys=self.options.keys,
        )  # fmt: skip

    def check(self) -> None:
        """The channel works, and receives the rank's heartbeats."""
        received = threading.Event()
        take = self.detector.beat
        self.detector.beat = lambda *beat: (take(*beat), received.set())[0]  # type: ignore[method-assign]
        assert received.wait(SECONDS)
        self.detector.beat = take  # type: ignore[method-assign]
        assert self.detector.failure is None and not self.detector.ending and self.left == []
        assert {"rank control", "heartbeat"} <= {thread.name for thread in threading.enumerate()}

    def close(self) -> None:
        self.link.close()
        self.control.close()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    running = Group(f"ipc://{tmp_path}/ranks")
    yield running
    running.close()


WRONG: list[Any] = [
    *(
        message
        for rank in (-1, 2, 99, 1 << 40)
        for message in (
            messages.Hello(rank, "there", 9),
            messages.Beat(rank, Position()),
            messages.Beat(rank, Position(), [1.0]),
            messages.Loaded(rank, {"ops": "other"}),
            messages.Failed(rank, "broken"),
            messages.Died(rank, "died"),
            messages.Ended(rank),
            messages.NodeHere(rank, "there", 9),
        )
    ),
    # with ranks of this group, from a foreign process
    messages.Hello(0, "there", 9),
    messages.Hello(1, "there", 9, fingerprint={"dtype": "other"}),
    messages.Failed(1, "broken"),
    messages.Died(1, "died"),
    messages.Ended(1),
    messages.NodeRefused("there", 9, "too late"),
    messages.Alive(),
    messages.Leave("no reason"),
    core_messages.Shutdown(),
]


@pytest.mark.parametrize(
    "message", WRONG, ids=lambda message: f"{type(message).__name__}{getattr(message, 'rank', '')}"
)
def test_control_channel_drops_messages_of_non_members(
    group: Group, message: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = stranger(zmq.DEALER, group.control.address)
    monkeypatch.setattr(logging.getLogger("moe_engine"), "propagate", True)  # a server set up by a test before keeps it
    with caplog.at_level(logging.WARNING, "moe_engine"):
        sender.send(encode(message))
        sender.send_multipart([b"", encode(message)])
        until(lambda: group.control.num_dropped >= 2, "it was not counted")
        group.check()
    assert "control channel of the ranks: dropped" in caplog.text
    sender.close(0)


def test_second_process_of_a_rank_is_refused_with_the_reason(group: Group) -> None:
    for hello, reason in (
        (messages.Hello(1, "there", 9), "rank 1 has joined already"),
        (messages.Hello(99, "there", 9), "there is no rank 99"),
        (messages.NodeHere(5, "there", 9), "there is no node 5"),
    ):
        sender = stranger(zmq.DEALER, group.control.address)
        sender.send(encode(hello))
        assert sender.poll(int(SECONDS * 1000))
        answer = messages.decode_to_rank(sender.recv())
        assert isinstance(answer, messages.Leave) and reason in answer.reason
        sender.close(0)
    group.check()


def test_failed_control_thread_fails_the_group(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[str] = []
    group.detector.on_failure(lambda failure: failures.append(str(failure)))
    monkeypatch.setattr(group.detector, "tick", lambda elapsed: 1 / 0)
    until(lambda: failures, "the end of the thread was not noticed")
    assert failures == ['the thread "rank control" failed: ZeroDivisionError: division by zero']


def test_failed_heartbeat_thread_exits_the_process(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group.link, "_make_beat", lambda: 1 / 0)
    until(lambda: group.left, "the end of the thread was not noticed")
    assert group.left[0].startswith('the thread "heartbeat" failed: ZeroDivisionError')


class FakeLeader:
    """The leader's side of a heartbeat client; sends the frames of the test."""

    def __init__(self, address: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.bind(address)
        self.left: list[str] = []
        hello, beat = messages.Hello(1, "here", 9), messages.Beat(1, Position())

        self.link = HeartbeatClient(address, "rank1", hello, lambda: beat, LIMITS, self.left.append)
        while (found := self.socket.recv_multipart())[0] != b"rank1":
            pass
        self.rank = found[0]

    def say(self, *frames: bytes) -> None:
        self.socket.send_multipart([self.rank, *frames])

    def check(self) -> None:
        """Waits for two heartbeats: then the link has handled all messages sent so far."""
        while self.socket.poll(0):
            self.socket.recv_multipart()
        beats = 0
        while beats < 2:
            self.link.beat_now()
            assert self.socket.poll(int(SECONDS * 1000)), "the link sends no heartbeats"
            identity, body = self.socket.recv_multipart()
            found = messages.decode_to_leader(body) if identity == self.rank else None
            beats += isinstance(found, messages.Beat)
        assert self.left == []

    def close(self) -> None:
        self.link.close()
        self.socket.close(0)


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[FakeLeader]:
    made = FakeLeader(f"ipc://{tmp_path}/leader")
    yield made
    made.close()


def test_heartbeat_client_drops_invalid_messages(leader: FakeLeader) -> None:
    for frames in (
        [b"garbage"],
        [b""],
        [encode(messages.Alive()), b"more"],
        [encode(messages.Ended(1))],  # for a leader
        [encode(messages.Welcome("a", "b", 1, "c"))],
        [encode(messages.Welcome("a", "b", 1, "c"))],
    ):
        leader.say(*frames)
    leader.check()


def test_heartbeat_client_survives_random_frames(leader: FakeLeader) -> None:
    def is_real(frame: bytes) -> bool:
        try:
            found = messages.decode_to_rank(frame)
        except Exception:
            return False
        return isinstance(found, messages.Leave)

    seed = random.randrange(1 << 30)
    strays = Strays(seed, is_real)
    for number in range(NUM_FRAMES):
        leader.say(*strays.draw())
        if number % 200 == 0:
            leader.check()
    leader.check()


def test_the_control_channel_survives_random_frames(group: Group) -> None:
    """Frames from foreign processes, and from the launcher of a node, which is a member."""

    def a_death(frame: bytes) -> bool:  # which the launcher may report
        try:
            return isinstance(messages.decode_to_leader(frame), messages.Died)
        except Exception:
            return False

    seed = random.randrange(1 << 30)
    rng, strays = random.Random(seed), Strays(seed, a_death)
    member = stranger(zmq.DEALER, group.control.address, b"node1 there 9")
    member.send(encode(messages.NodeHere(1, "there", 9)))
    identities = [b"", b"echo 1", b"echo rank1", b"echo", b"rank99", b"\xff" * 20]
    senders = [member, *(stranger(zmq.DEALER, group.control.address, identity) for identity in identities)]
    for number in range(NUM_FRAMES):
        sender = rng.choice(senders)
        sender.send_multipart(strays.draw())
        while sender.poll(0):
            sender.recv()
        if number % 200 == 0:
            group.check()
    group.check()
    assert group.control.num_dropped > NUM_FRAMES // 4, seed
    for sender in senders:
        sender.close(0)


def test_non_zmtp_bytes_are_harmless() -> None:
    options = RankGroupOptions(2, lambda: None, num_nodes=2, leader_address="127.0.0.1:1", limits=LIMITS)
    running = Group("tcp://127.0.0.1:*", options)
    host, _, port = running.control.address.removeprefix("tcp://").rpartition(":")
    rng = random.Random(7)
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\3\0NULL" + b"\0" * 48
    for head in (b"", b"GET / HTTP/1.1\r\n\r\n", greeting, greeting + b"\4\x19\5READY\x0bSocket-Type\0\0\0\6DEALER"):
        for _ in range(20):
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(head + rng.randbytes(rng.choice((0, 10, 5000))))
    running.check()
    running.close()


# -- steps


WRONG_STEPS: list[Any] = [
    *(StepFactsMessage(1, group, StepFacts(num_tokens=9)) for group in (-1, 0, 2, 99, 1 << 40)),
    *(StepFactsMessage(number, 1, StepFacts(num_tokens=9)) for number in (-1, 0, 3, 1 << 40)),
]


def meshes(folder: Path) -> list[StepExchange]:
    made = [StepExchange(group, 2, f"ipc://{folder}/steps-{group}") for group in range(2)]
    for mesh in made:
        mesh.connect([other.address for other in made])
    return made


@pytest.mark.parametrize("message", WRONG_STEPS, ids=lambda message: f"{message.number}-{message.group}")
def test_parts_of_impossible_steps_are_dropped(tmp_path: Path, message: StepFactsMessage) -> None:
    """Frames with an impossible step number are dropped: they would stay in memory."""
    first, second = meshes(tmp_path)
    sender = stranger(zmq.PUSH, first.address)
    sender.send(encode(message))
    sender.send_multipart([encode(message), encode(message)])
    sender.send(b"\xc1")
    until(lambda: not first.begun(1) and first.num_dropped == 3, "it was not counted")
    second.send(1, StepFacts(num_tokens=2))
    first.send(1, StepFacts(num_tokens=1))
    assert [facts.num_tokens for facts in first.gather(1, lambda: None)] == [1, 2]
    assert first._facts == {}
    for closing in (first, second):
        closing.close()
    sender.close(0)


def test_duplicate_step_facts_count_once(tmp_path: Path) -> None:
    first, second = meshes(tmp_path)
    second.send(1, StepFacts(num_tokens=2))
    until(lambda: first.begun(1), "it has not arrived")
    sender = stranger(zmq.PUSH, first.address)
    sender.send(encode(StepFactsMessage(1, 1, StepFacts(num_tokens=9))))
    until(lambda: first.begun(1) and first.num_dropped == 1, "it was not counted")
    first.send(1, StepFacts(num_tokens=1))
    assert [facts.num_tokens for facts in first.gather(1, lambda: None)] == [1, 2]
    for closing in (first, second):
        closing.close()
    sender.close(0)


def test_step_sync_survives_random_frames(tmp_path: Path) -> None:
    def of_group_1(frame: bytes) -> bool:  # a forgery, which only a secret prevents
        try:
            return msgspec.msgpack.decode(frame, type=StepFactsMessage).group == 1
        except Exception:
            return False

    seed, pair = random.randrange(1 << 30), meshes(tmp_path)
    strays, sender = Strays(seed, of_group_1), stranger(zmq.PUSH, pair[0].address)
    steps = NUM_FRAMES // 10
    agreed: list[list[tuple[StepFacts, ...]]] = [[], []]

    def schedule(number: int) -> None:
        dp_sync = DPSync(pair[number], lambda: None)
        for step in range(steps):
            dp_sync.sync_step(StepPlan(step), StepFacts(num_tokens=10 * step + number))
            agreed[number].append(dp_sync.last)

    threads = [threading.Thread(target=schedule, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(NUM_FRAMES):
        sender.send_multipart(strays.draw())
    for thread in threads:
        thread.join(SECONDS)
    until(lambda: not pair[0].begun(steps + 1) and pair[0].num_dropped >= NUM_FRAMES * 0.9, f"seed {seed}")
    assert agreed[0] == agreed[1] and len(agreed[0]) == steps, seed
    assert [[facts.num_tokens for facts in step] for step in agreed[0]] == [[10 * i, 10 * i + 1] for i in range(steps)]
    assert pair[0]._facts == {}, seed
    for mesh in pair:
        mesh.close()
    sender.close(0)


# -- plans


def test_plans_arrive_among_random_subscriptions(tmp_path: Path) -> None:
    sender = PlanSender(f"ipc://{tmp_path}/plans")
    odd, seed = stranger(zmq.XSUB, sender.address), random.randrange(1 << 30)
    strays = Strays(seed, lambda frame: frame == b"\1rank1")
    odd.send(b"\1")  # subscribes to everything, without being a follower
    assert not sender.wait_subscribed(["rank1"], 0.2)
    receiver = PlanReceiver(sender.address, "rank1")
    for _ in range(NUM_FRAMES):
        odd.send_multipart(strays.draw())
    assert sender.wait_subscribed(["rank1"], SECONDS), seed
    for number in range(50):
        sender.send(StepPlan(number))
        found = receiver.receive(SECONDS)
        assert isinstance(found, Step) and found.plan.number == number, seed
    sender.close()
    receiver.close()
    odd.close(0)


def test_a_follower_survives_random_plans(tmp_path: Path) -> None:
    """The follower's socket receives only from the leader; frames of another version must not end the follower
    either."""
    leader: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
    leader.setsockopt(zmq.SNDHWM, 0)
    leader.bind(f"ipc://{tmp_path}/plans")
    receiver = PlanReceiver(f"ipc://{tmp_path}/plans", "rank1")
    assert {leader.recv(), leader.recv()} == {b"\1", b"\1rank1"}

    def is_plan(frame: bytes) -> bool:
        try:
            return bool(msgspec.msgpack.decode(frame, type=Step | Run))
        except Exception:
            return False

    def stops(frame: bytes) -> bool:
        return is_plan(frame) or frame[:1] == b"\x92"

    seed = random.randrange(1 << 30)
    strays = Strays(seed, stops)
    for number in range(NUM_FRAMES // 20):
        for _ in range(20):
            leader.send_multipart(strays.draw())
        leader.send(encode(Step(number + 1, StepPlan(number))))
        while (found := receiver.receive(SECONDS)) is None:
            pass
        assert isinstance(found, Step) and found.plan.number == number, seed
    receiver.close()
    leader.close(0)


# -- requests


def test_requests_reach_the_core_among_random_frames(tmp_path: Path) -> None:
    port = ZmqTransport(f"ipc://{tmp_path}/to", f"ipc://{tmp_path}/from")
    seed, sender = random.randrange(1 << 30), stranger(zmq.PUSH, port.address)
    strays, asked, arrived = Strays(seed, lambda frame: False), 0, 0
    for number in range(NUM_FRAMES):
        sender.send_multipart(strays.draw())
        if number % 20 == 0:
            asked += 1
            sender.send(encode(core_messages.Call(1 << 50, "real")))
        arrived += sum(getattr(message, "method", "") == "real" for message in port.receive(0.0))
    deadline = time.monotonic() + SECONDS
    while arrived < asked and time.monotonic() < deadline:
        arrived += sum(getattr(message, "method", "") == "real" for message in port.receive(0.1))
    assert arrived == asked, seed
    port.close()
    sender.close(0)
