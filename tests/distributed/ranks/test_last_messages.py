"""The last message of a process that exits arrives, also if its receiver is slow."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import zmq

from moe_engine.cluster.control_server import ControlServer
from moe_engine.cluster.core_spec import REPORTED_FAILURE
from moe_engine.cluster.failure_detector import FailureDetector
from moe_engine.cluster.heartbeat_client import HeartbeatClient
from moe_engine.executor import messages
from moe_engine.executor.options import DetectorLimits, RankGroupOptions
from moe_engine.executor.progress import Position
from tests.distributed.ranks.drill import drill, ended, options
from tests.distributed.ranks.drill import until as until_async
from tests.distributed.ranks.held import Hold, meeting_worker
from tests.models.checkpoints import make_checkpoint
from tests.waiting import until

LIMITS = DetectorLimits(silent=60.0, start_silent=60.0)


class Leader:
    """A leader's socket that is read by the test, and a rank's heartbeat client."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
        self._socket.bind(address)
        self._socket.setsockopt(zmq.RCVTIMEO, 60_000)
        hello, beat = messages.Hello(1, "here", 9), messages.Beat(1, Position())
        self.link = HeartbeatClient(address, "rank1", hello, lambda: beat, LIMITS, lambda reason: None)
        self.closing = threading.Thread(target=self.link.close)
        assert isinstance(self.answer(), messages.Hello)

    def answer(self) -> messages.ToLeader:
        """Acknowledges the rank's next message, and returns it."""
        while (frames := self._socket.recv_multipart())[0] != b"rank1":  # its echo
            pass
        self._socket.send_multipart([b"rank1", messages.encode(messages.Alive())])
        return messages.decode_to_leader(frames[1])

    def vanish(self) -> None:
        self._socket.close(0)


@pytest.fixture
def leader(tmp_path: Path) -> Leader:
    return Leader(f"ipc://{tmp_path}/leader")


def test_a_rank_exits_when_its_report_is_acknowledged(leader: Leader) -> None:
    leader.link.send(messages.Ended(1))
    leader.closing.start()
    for _ in range(3):
        leader.closing.join(0.1)
        assert leader.closing.is_alive()
    while not isinstance(leader.answer(), messages.Ended):
        pass
    leader.closing.join(60)
    assert not leader.closing.is_alive()


@pytest.mark.parametrize("reports", [False, True])
def test_a_rank_without_a_leader_or_a_report_waits_for_nothing(
    leader: Leader, reports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_engine.cluster.heartbeat_client.ACK_SECONDS", 1000.0)
    until(leader.link.met.is_set)
    if reports:
        leader.link.send(messages.Ended(1))
        leader.vanish()
    leader.closing.start()
    leader.closing.join(60)
    assert not leader.closing.is_alive()


def test_a_leader_that_closes_sends_a_failure_found_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = RankGroupOptions(2, lambda: None, num_nodes=2, leader_address="127.0.0.1:1", limits=LIMITS)
    detector = FailureDetector(options.places, LIMITS, Position, ("here", 1))
    control = ControlServer(f"ipc://{tmp_path}/ranks", options, detector)
    left: list[str] = []
    hello, beat = messages.Hello(1, "here", 101), messages.Beat(1, Position())
    link = HeartbeatClient(control.address, "rank1", hello, lambda: beat, LIMITS, left.append)
    until(link.met.is_set)

    def fail_last(now: float, began: float, logged_at: float) -> float:
        """At the end of the thread's last iteration."""
        detector.give_up("DP0 TP0 failed")
        control._closing.set()
        return logged_at

    monkeypatch.setattr(control, "_check_start", fail_last)
    until(lambda: left, "the rank got no reason")
    assert left[0] == "DP0 TP0 failed"
    link.close()
    control.close()


@pytest.mark.usefixtures("forked_processes")
def test_a_core_is_lost_for_the_reason_that_it_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its frontend reads the report long after its exit."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GOMP_SPINCOUNT", "100")
    checkpoint = make_checkpoint("deepseek_v3", tmp_path / "model", seed=31)

    async def run() -> None:
        hold = Hold(1, "decode", tmp_path / "flag", 3)
        async with drill(checkpoint, options(2, partial(meeting_worker, hold=hold))) as running:
            running.ask([5, 6, 7], 400)
            await until_async(hold.flag.exists)
            leader, follower = running.ranks
            follower.send_signal(signal.SIGKILL)
            until(lambda: ended(leader))
            time.sleep(0.5)  # the loop is blocked: the report is unread
            assert running.core.dead is None
            (fate,) = await running.fates()
            expected = f"DP0 TP1 (pid {follower.pid}) was killed by SIGKILL"
            assert expected in fate.error and expected in str(running.core.dead)
            assert running.core._child.returncode in (None, REPORTED_FAILURE)

    asyncio.run(run())
