"""A core and its worker after a loss of other ranks."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import pytest

from moe_engine.core.executor import RankLost
from moe_engine.core.loop import EngineCore, LoopSettings
from moe_engine.elastic import rank as elastic_rank
from moe_engine.elastic.leader_worker import Membership, SurvivingWorker
from moe_engine.elastic.rank import serve_across_losses
from moe_engine.elastic.recovery import Recovered
from moe_engine.elastic.survivors import RanksChanged, Survivors
from moe_engine.errors import CheckpointError
from moe_engine.executor.progress import Progress
from moe_engine.types import StepPlan


def test_pause_of_a_loss_before_the_first_iteration_is_zero(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(elastic_rank, "time", Mock(monotonic=lambda: 5000.0))
    survivors, over = Survivors((True, False), ("DP1 TP1 (pid 101) was killed by SIGKILL",)), RuntimeError("over")
    core = EngineCore(
        Mock(start_over=lambda: [], config=Mock(vocab_size=None)),
        *(Mock() for _ in range(4)),
        LoopSettings(frozenset()),
        check=Mock(side_effect=[RanksChanged("DP1"), over]),
    )
    worker = Mock(regroup=lambda waiting: (survivors, Recovered(3, 0, 0.5)))
    status = Mock(read=lambda: Mock(silence=0.0))
    with pytest.raises(RuntimeError, match="over"):
        serve_across_losses(core, worker, Mock(), status, 0)
    assert "Serving paused for 0.00 s and continues with 1 of 2 ranks: 3 experts copied, 0 read" in caplog.text


class Regroups:
    """Steps end at once; `formed` are the new groups."""

    def __init__(self, formed: Future[Any]) -> None:
        self.formed = formed

    def give_up(self) -> None: ...

    def drain(self) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def go_on(self, survivors: Survivors) -> Future[Any]:
        return self.formed


def test_failed_regroup_names_the_lost_rank() -> None:
    formed: Future[Any] = Future()
    formed.set_exception(CheckpointError("/models/m: holds no *.safetensors file"))
    failures: list[tuple[str, bool, int]] = []
    members = Membership(2, lambda *failure: failures.append(failure))
    worker = SurvivingWorker(Mock(), Mock(sequence=1), members, Progress(), 0, Regroups(formed))
    hanging = worker.execute(StepPlan(1))
    members.announce(Survivors((True, False), ("TP1 (pid 7) was killed by SIGKILL",)))
    for future in (hanging, worker.execute(StepPlan(2))):
        with pytest.raises(RanksChanged, match="TP1"):
            future.result(0)
    with pytest.raises(RanksChanged, match="TP1"):
        worker.check()

    def waiting() -> None:
        if failures:
            members.failure = RankLost("TP1 is lost")

    with pytest.raises(RankLost):
        worker.regroup(waiting)
    ((message, peer_lost, generation),) = failures
    assert message.startswith("/models/m: holds no *.safetensors file; ") and not peer_lost and generation == 1
    assert "TP1 (pid 7) was killed by SIGKILL" in message


def test_regroup_restarts_if_more_ranks_are_lost_meanwhile() -> None:
    members, formed = Membership(3, Mock()), Future[Any]()
    worker = SurvivingWorker(Mock(), Mock(sequence=1), members, Progress(), 0, Regroups(formed))
    members.announce(Survivors((True, True, False), ("TP2",)))

    def waiting() -> None:
        members.announce(Survivors((True, False, False), ("TP2", "TP1")))
        formed.set_result("formed")

    survivors, result = worker.regroup(waiting)
    assert survivors.alive == (True, False, False) and result == "formed" and members.generation == 2
    worker.check()
