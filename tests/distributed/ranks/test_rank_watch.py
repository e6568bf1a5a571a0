"""The failure detector over ranks, tick by tick, without processes and clocks."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from moe_engine.cluster.failure_detector import TICK_SECONDS, FailureDetector
from moe_engine.core.executor import RankLost
from moe_engine.executor.options import DetectorLimits, RankGroupOptions
from moe_engine.executor.progress import Position
from moe_engine.processes.stopped import is_starved, is_stopped
from tests.waiting import until

LIMITS = DetectorLimits(silent=3.0, start_late=5.0, start_silent=15.0, late=1.0, late_factor=3.0)


class Ranks:
    """A failure detector over four ranks whose positions the test sets; rank 0's is `positions[0]`."""

    def __init__(self, size: int = 4, num_nodes: int = 1) -> None:
        address = "head:5000" if num_nodes > 1 else None
        options = RankGroupOptions(size, lambda: None, num_nodes=num_nodes, leader_address=address)
        self.positions = [Position()] * size
        self.detector = FailureDetector(options.places, LIMITS, lambda: self.positions[0], ("head", 100))
        for rank in range(1, size):
            self.detector.joined(rank, f"host{rank}", 100 + rank)
            self.detector.loaded(rank, {})
        self.detector.loaded(0, {})
        self.detector.arm()

    def run(self, seconds: float, silent: tuple[int, ...] = (), tick: float = TICK_SECONDS) -> None:
        for _ in range(round(seconds / tick)):
            for rank in range(1, len(self.positions)):
                if rank not in silent:
                    self.detector.beat(rank, self.positions[rank])
            self.detector.tick(tick)

    @property
    def failure(self) -> str:
        return str(self.detector.failure or "")


@pytest.fixture
def ranks(caplog: pytest.LogCaptureFixture) -> Ranks:
    logger = logging.getLogger("moe_engine")
    logger.propagate = True
    caplog.set_level(logging.WARNING, "moe_engine")
    return Ranks()


def loading(*running: int, caplog: pytest.LogCaptureFixture, seconds: float) -> tuple[FailureDetector, list[str]]:
    """A failure detector over three ranks, the last of which has not joined, after `seconds` of heartbeats of the
    others."""
    places = RankGroupOptions(3, lambda: None).places
    detector = FailureDetector(places, LIMITS, lambda: Position(phase="loading"), ("head", 100))
    detector.joined(1, "head", 101)
    detector.beat(1, Position(phase="importing"))
    for _ in range(round(seconds / TICK_SECONDS)):
        for rank in running:
            detector.runs(rank)
        detector.tick(TICK_SECONDS)
    return detector, caplog.messages


def test_startup_logs_silent_ranks_then_fails(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    detector, logged = loading(caplog=caplog, seconds=14.8)
    assert logged == ["TP1 (pid 101) silent for 5.1 s during startup (last sign: importing)"]
    assert detector.failure is None
    caplog.clear()
    detector, logged = loading(caplog=caplog, seconds=15.3)
    assert len(logged) == 1 and "TP1 (pid 101) silent for 15.1 s" in str(detector.failure)


def test_startup_waits_for_live_ranks(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    detector, logged = loading(1, caplog=caplog, seconds=600.0)
    assert not logged and detector.failure is None


def in_step(step: int, operations: int, operation: str = "all_gather") -> Position:
    return Position(step - 1, operations, step, "running the model", operation)


def test_the_rank_that_others_wait_for_is_late_once(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    ranks.positions = [in_step(812, 41), in_step(812, 41), in_step(812, 41), in_step(812, 40)]
    ranks.run(0.9)
    assert not caplog.messages
    ranks.run(1.6)
    assert caplog.messages == ["TP3 (pid 103) is late: step 812, running the model, after all_gather, 1.1 s"]
    ranks.positions = [in_step(812, 42)] * 4
    ranks.run(0.5)
    assert len(caplog.messages) == 1 and not ranks.failure


def test_rank_without_the_plan_is_late(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    ranks.positions = [in_step(7, 1), in_step(7, 1), Position(6, 0), in_step(7, 1)]
    ranks.run(1.5)
    assert [line.split(",")[0] for line in caplog.messages] == ["TP2 (pid 102) is late: idle"]


def test_late_limit_scales_with_step_time(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    ranks.detector.stepped(2.0)
    ranks.positions = [in_step(3, 5), in_step(3, 4), in_step(3, 5), in_step(3, 5)]
    ranks.run(5.8)
    assert not caplog.messages
    ranks.run(0.5)
    assert caplog.messages[0].startswith("TP1 (pid 101) is late: step 3")


def test_slow_step_blames_no_rank(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    ranks.positions = [in_step(3, 5)] * 4
    ranks.run(2.0)
    assert [line.split(",")[0] for line in caplog.messages] == ["Every rank is slow: step 3"]


def test_idle_is_neither_late_nor_slow(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    ranks.positions = [Position(9, 90)] * 4
    ranks.run(600.0)
    ranks.positions = [in_step(10, 91), Position(9, 90), in_step(10, 90), in_step(10, 91)]  # one has no plan yet
    ranks.run(0.5)
    assert not caplog.messages and not ranks.failure


@pytest.fixture
def busy_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield process
        process.kill()


def test_a_silent_rank_that_waits_for_a_processor_is_not_lost(
    ranks: Ranks, busy_process: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """At a load of 90 a heartbeat thread did not run for 3 s. A stopped rank is lost as before."""
    ranks.detector.joined(2, "head", busy_process.pid)
    until(lambda: is_starved(busy_process.pid))
    ranks.run(6.0, silent=(2,))
    assert not ranks.failure
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith(" s: it runs; this machine has too few processors")
    busy_process.send_signal(signal.SIGSTOP)
    until(lambda: is_stopped(busy_process.pid))
    ranks.run(0.2, silent=(2,))
    assert f"TP2 (pid {busy_process.pid}) silent for 6." in ranks.failure


def test_a_busy_rank_without_heartbeats_is_lost_later(ranks: Ranks, busy_process: subprocess.Popen[bytes]) -> None:
    ranks.detector.joined(2, "head", busy_process.pid)
    until(lambda: is_starved(busy_process.pid))
    ranks.run(15.3, silent=(2,))
    assert "silent for 15.1 s" in ranks.failure


def test_silence_fails_the_group_and_names_all_silent_ranks(ranks: Ranks) -> None:
    failures: list[RankLost] = []
    ranks.detector.on_failure(failures.append)
    ranks.positions = [in_step(4, 2)] * 4
    ranks.run(1.0)
    ranks.run(2.7, silent=(1, 2))
    assert not ranks.failure
    ranks.run(0.5, silent=(1, 2))
    assert ranks.failure.startswith("TP1 (pid 101), TP2 (pid 102) silent for 3.") and "step 4" in ranks.failure
    assert [str(failure) for failure in failures] == [ranks.failure]


def test_time_in_which_the_detector_was_suspended_is_not_silence(ranks: Ranks) -> None:
    for _ in range(5):
        ranks.detector.tick(60.0)  # a suspended machine, five times
    assert not ranks.failure


def test_peer_lost_error_waits_for_the_dead_rank(ranks: Ranks) -> None:
    ranks.detector.failed(2, "all_gather failed: Connection closed by peer", peer_lost=True)
    ranks.run(1.0)
    ranks.detector.died(3, "TP3 (pid 103) was killed by SIGKILL")
    ranks.detector.failed(1, "all_gather failed", peer_lost=True)
    ranks.run(10.0)
    assert ranks.failure.startswith("TP3 (pid 103) was killed by SIGKILL")


def test_short_silence_suffices_after_a_peer_lost_error(ranks: Ranks) -> None:
    ranks.detector.failed(2, "all_gather failed: Connection closed by peer", peer_lost=True)
    ranks.run(1.0, silent=(3,))  # its whole node died, so no process on it reports the loss
    assert ranks.failure.startswith("TP3 (pid 103) silent for 0.9 s")


def test_a_collective_that_timed_out_blames_the_rank_behind(ranks: Ranks) -> None:
    ranks.positions = [in_step(4, 9), in_step(4, 8), in_step(4, 9), in_step(4, 9)]
    ranks.detector.failed(2, "all_gather timed out", peer_lost=True)
    ranks.run(5.0)
    assert (
        ranks.failure.startswith("TP1 (pid 101) never entered the collective: step 4") and "all_gather" in ranks.failure
    )


def test_own_error_names_the_rank(ranks: Ranks) -> None:
    ranks.detector.failed(2, "ValueError: no such slot", config_error=False)
    ranks.detector.died(2, "TP2 (pid 102) exited with code 1")
    assert ranks.failure == "TP2 (pid 102) failed: ValueError: no such slot"


def test_exits_during_shutdown_are_no_loss(ranks: Ranks) -> None:
    ranks.detector.end()
    ranks.detector.died(1, "TP1 (pid 101) exited with code 0")
    ranks.run(10.0, silent=(1, 2, 3))
    assert not ranks.failure


def test_ranks_with_other_kernels_may_not_start(ranks: Ranks) -> None:
    ranks.detector.loaded(0, {"ops": "cpu"})
    assert "TP1 (pid 101) chose the kernels {}, rank 0 {'ops': 'cpu'}" in ranks.failure and ranks.detector.config_error


def test_names_contain_the_host_with_several_nodes() -> None:
    detector = Ranks(num_nodes=2).detector
    assert [detector.describe(rank) for rank in (0, 3)] == ["TP0 (pid 100 on head)", "TP3 (pid 103 on host3)"]
