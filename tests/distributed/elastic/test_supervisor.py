"""The failure detector and the supervisor of ranks that may be lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from moe_engine.cluster import heartbeat_client
from moe_engine.core import messages
from moe_engine.elastic import supervisor as rank_supervisor
from moe_engine.elastic.detector import ElasticDetector
from moe_engine.elastic.leader_worker import Membership
from moe_engine.elastic.messages import Ready
from moe_engine.elastic.rank import RankHeartbeat
from moe_engine.elastic.survivors import Survivors
from moe_engine.executor import messages as rank_messages
from moe_engine.executor.options import DetectorLimits, RankGroupOptions
from moe_engine.executor.progress import Position
from moe_engine.planning.parallelism.resolve_elastic import Coverage
from tests.server.fake_engine import INFO
from tests.waiting import until


class Watched:
    def __init__(self, coverage: Coverage) -> None:
        places = RankGroupOptions(4, lambda: None, num_groups=4).places
        self.detector = ElasticDetector(places, DetectorLimits(silent=3.0), coverage)
        for rank in range(4):
            self.detector.joined(rank, "here", 100 + rank)
            self.detector.loaded(rank, {})
        self.announced: list[Survivors] = []
        self.detector.on_survivors(self.announced.append)
        self.detector.arm()

    def run(self, seconds: float, silent: tuple[int, ...] = ()) -> None:
        for _ in range(round(seconds / 0.1)):
            for rank in {0, 1, 2, 3}.difference(silent):
                self.detector.beat(rank, Position())
            self.detector.tick(0.1)


def test_simultaneous_losses_are_announced_together_and_later_failures_ignored() -> None:
    ranks = Watched(Coverage(8, 4))
    ranks.detector.died(0, "DP0 TP0 (pid 100) was killed by SIGKILL")
    ranks.detector.failed(2, "all_to_all failed", peer_lost=True)
    ranks.detector.died(3, "DP3 TP3 (pid 103) was killed by SIGKILL")
    assert not ranks.announced
    ranks.run(0.3)
    (survivors,) = ranks.announced
    assert survivors.alive == (False, True, True, False) and survivors.generation == 1
    assert "DP0 TP0 (pid 100)" in survivors.losses[0] and "DP3 TP3 (pid 103)" in survivors.losses[0]
    ranks.detector.failed(2, "step 7 failed", peer_lost=False, generation=0)  # the step in flight fails
    ranks.run(8.0, silent=(0, 3))  # lost ranks are not reported again
    assert ranks.detector.failure is None and len(ranks.announced) == 1
    ranks.detector.failed(2, "step 9 failed", peer_lost=False, generation=1)
    assert "step 9 failed" in str(ranks.detector.failure)


def test_a_silent_rank_is_lost_until_experts_have_no_room() -> None:
    ranks = Watched(Coverage(8, 3))
    ranks.run(4.0, silent=(2,))
    assert [survivors.alive for survivors in ranks.announced] == [(True, True, False, True)]
    assert "DP2 TP2 (pid 102) silent for 3." in ranks.announced[0].losses[0]
    ranks.detector.died(1, "DP1 TP1 (pid 101) exited with code 1")
    failure = str(ranks.detector.failure)
    assert "DP1 TP1 (pid 101) exited with code 1" in failure
    assert "2 of 4 ranks cannot hold 8 experts in 3 slots each: --ep-num-redundant-experts 8 would" in failure


def test_failure_names_all_simultaneous_losses() -> None:
    ranks = Watched(Coverage(8, 3))
    for rank in (1, 2):
        ranks.detector.died(rank, f"DP{rank} TP{rank} (pid 10{rank}) was killed by SIGKILL")
    failure = str(ranks.detector.failure)
    assert "DP1 TP1 (pid 101) was killed" in failure and "DP2 TP2 (pid 102) was killed" in failure
    assert "2 of 4 ranks cannot hold 8 experts" in failure and not ranks.announced


def test_the_loss_of_all_ranks_is_a_failure_with_their_names() -> None:
    ranks = Watched(Coverage(8, 8))
    for rank in range(4):
        ranks.detector.died(rank, f"DP{rank} TP{rank} (pid 10{rank}) was killed by SIGKILL")
    failure = str(ranks.detector.failure)
    assert "DP0 TP0 (pid 100) was killed" in failure and failure.endswith("; no rank is left")


# -- the supervisor


class SupervisedRanks:
    """A supervisor whose ranks are links in this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rank_supervisor, "LocalRanks", Mock())
        monkeypatch.setattr(rank_supervisor, "open_store", lambda options, host: Mock(port=1))
        options = RankGroupOptions(3, lambda: None, num_groups=3)
        spec = Mock(status_path=folder / "status")
        self.supervisor = rank_supervisor.RankSupervisor(None, options, spec, Coverage(4, 4))
        self.announced: list[Survivors] = []
        self.links = [self._link(rank, f"ipc://{folder}/ranks") for rank in range(3)]

    def _link(self, rank: int, address: str) -> RankHeartbeat:
        hello, limits = rank_messages.Hello(rank, "here", 100 + rank), DetectorLimits(silent=60.0)
        members = Membership(3, Mock())
        members.on_change = lambda change: self.announced.append(members.survivors)
        link = RankHeartbeat(
            members,
            address,
            f"rank{rank}",
            hello,
            lambda: rank_messages.Beat(rank, Position()),
            limits,
            lambda reason: None,
        )
        link.send(Ready(rank, replace(INFO, model_path=f"of {rank}")))
        link.send(rank_messages.Loaded(rank, {}, f"core{rank}"))
        return link

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.supervisor.close()


@pytest.fixture
def supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SupervisedRanks]:
    running = SupervisedRanks(tmp_path, monkeypatch)
    yield running
    running.close()


def test_supervisor_has_no_rank_and_reports_every_loss(supervised: SupervisedRanks) -> None:
    ready = supervised.supervisor.start()
    assert ready == messages.CoreReady(replace(INFO, model_path="of 0"), ["core0", "core1", "core2"])
    supervised.supervisor._detector.died(0, "DP0 TP0 (pid 100) was killed by SIGKILL")  # before a listener exists
    until(lambda: len(supervised.announced) == 2, "the ranks were not notified")
    reported: list[messages.GroupsLost] = []

    def report(loss: messages.GroupsLost) -> None:
        reported.append(loss)
        supervised.links[1].send(rank_messages.Ended(1))

    supervised.supervisor.run(report)
    ((groups, message),) = [(loss.groups, loss.message) for loss in reported]
    assert groups == [0] and "DP0 TP0 (pid 100) was killed by SIGKILL" in message
    assert {survivors.alive for survivors in supervised.announced} == {(False, True, True)}


def test_orderly_exit_is_acknowledged_before_the_rank_leaves(
    supervised: SupervisedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_client, "ACK_SECONDS", 120.0)  # its limit of 5 s passes on a busy machine
    supervised.supervisor.start()
    received = threading.Event()

    def end() -> None:
        time.sleep(0.3)  # a supervisor that is slow to read
        received.set()

    supervised.supervisor._detector.end = end  # type: ignore[method-assign]
    supervised.links[1].send(rank_messages.Ended(1))
    supervised.links[1].close()
    assert received.is_set()
