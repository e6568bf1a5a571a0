"""Parts of surviving lost ranks, each by itself: groups, failure detector, step sync, migration of requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from moe_engine.cluster import rank_supervisor
from moe_engine.cluster.failure_detector import FailureDetector
from moe_engine.cluster.heartbeat_client import HeartbeatClient
from moe_engine.core import loop as core
from moe_engine.core import messages
from moe_engine.core.dp_sync import LOST, DPSync, StepExchange
from moe_engine.core.executor import RanksChanged, Survivors
from moe_engine.errors import EngineDeadError
from moe_engine.executor import messages as rank_messages
from moe_engine.executor.options import DetectorLimits, RankGroupOptions
from moe_engine.executor.progress import Position
from moe_engine.parallel.collectives import POLL_INTERVAL, Group, SingleRank
from moe_engine.parallel.dispatch.expert_ids import without_lost
from moe_engine.parallel.elastic import ElasticWorld, SurvivorGroup
from moe_engine.parallel.placement.coverage import Coverage
from moe_engine.parallel.recording.balance_windows import BalanceWindows
from moe_engine.types import StepFacts, StepPlan
from moe_engine.worker.eplb.expert_recovery import Recovered
from tests.distributed.dispatch.ranks import run_ranks
from tests.distributed.elastic.survival import until
from tests.distributed.engine.test_client import ask, client_of, request
from tests.server.fake_engine import INFO

# -- groups


class Threads(SingleRank):
    """A group of this process's threads; implements only the primitive operations."""

    def __init__(self, rank: int, desk: list[Any], meet: threading.Barrier) -> None:
        super().__init__()
        self.size, self.rank = len(desk), rank
        self._desk, self._meet = desk, meet

    def _exchange(self, mine: Any) -> list[Any]:
        self._desk[self.rank] = mine
        self._meet.wait(10)
        all_of_them = list(self._desk)
        self._meet.wait(10)
        return all_of_them

    def all_to_all(self, out: Tensor, x: Tensor, out_rows: Any = None, x_rows: Any = None) -> None:
        sizes = [len(x) // self.size] * self.size if x_rows is None else list(x_rows)
        out.copy_(torch.cat([parts[self.rank] for parts in self._exchange(x.split(sizes))]))

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x))

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x.copy_(self._exchange(x.clone())[source])

    def exchange_ints(self, values: Any) -> list[int]:
        return [row[self.rank] for row in self._exchange(list(values))]


def on_survivors(alive: list[bool], work: Callable[[Group], Any]) -> dict[int, Any]:
    """work(group of full size) on a thread for each rank alive; by rank."""
    places = [rank for rank, lives in enumerate(alive) if lives]
    desk, meet = [None] * len(places), threading.Barrier(len(places))

    def run(at: int) -> Any:
        group = SurvivorGroup(SingleRank())
        group.size, group.rank = len(alive), places[at]
        group.enter(Threads(at, desk, meet), alive)
        return work(group)

    with ThreadPoolExecutor(len(places)) as threads:
        return dict(zip(places, threads.map(run, range(len(places)))))


@pytest.mark.parametrize("alive", [[True, False, True, True], [True, False, False, True], [True, False, False, False]])
def test_a_lost_rank_sends_zeros_and_gets_nothing(alive: list[bool]) -> None:
    size, generator = len(alive), torch.Generator().manual_seed(3)
    x = torch.randn(size, size, 2, 3, generator=generator)  # by sender and receiver, two rows each
    x[[not lives for lives in alive]] = 0
    places = torch.tensor(alive).nonzero().flatten().tolist()

    def equal(group: Group) -> Tensor:
        out = torch.full((2 * size, 3), 9.0)
        group.all_to_all(out, x[group.rank].flatten(0, 1))
        return out

    def counted(group: Group) -> tuple[list[int], Tensor]:
        """Rank r sends r + 1 rows to each that lives."""
        sent = [(group.rank + 1) * lives for lives in alive]
        arriving = group.exchange_ints(sent)
        out = torch.empty(sum(arriving), 1)
        group.all_to_all(out, torch.full((sum(sent), 1), float(group.rank)), arriving, sent)
        return arriving, out

    for rank, out in on_survivors(alive, equal).items():
        assert torch.equal(out, x[:, rank].flatten(0, 1))
    for arriving, out in on_survivors(alive, counted).values():
        assert arriving == [(rank + 1) * lives for rank, lives in enumerate(alive)]
        assert out.flatten().tolist() == [float(rank) for rank in places for _ in range(rank + 1)]
    for gathered in on_survivors(alive, lambda group: group.all_gather(x[group.rank])).values():
        assert torch.equal(gathered, x)
    for rank, summed in on_survivors(alive, lambda group: group.reduce_scatter(x[group.rank])).items():
        torch.testing.assert_close(summed, x[:, rank].sum(0))
    last = places[-1]
    for received in on_survivors(alive, lambda group: group.broadcast(x[group.rank].clone(), last)).values():
        assert torch.equal(received, x[last])


def test_ids_of_lost_ranks_name_no_expert() -> None:
    ids = torch.arange(12, dtype=torch.int32).view(6, 2)  # two rows of each of three ranks
    assert without_lost(ids, None) is ids
    masked = without_lost(ids, torch.tensor([True, False, True]))
    assert masked.tolist() == [[0, 1], [2, 3], [-1, -1], [-1, -1], [8, 9], [10, 11]]


def late_messages(rank: int) -> list[list[float]]:
    """What came from each rank, of which the last is in no hurry: longer than a wait lasts at a time."""
    world = ElasticWorld(2, rank, 20.0, "cpu", ("world",))
    link = world.link()
    if rank == 1:
        time.sleep(4 * POLL_INTERVAL.total_seconds())
    arrived = [torch.zeros(rank + 1, dtype=torch.float64) for _ in range(2)]
    sends = [(peer, torch.full((peer + 1,), float(10 * rank + peer), dtype=torch.float64)) for peer in range(2)]
    works = link.start(sends, list(enumerate(arrived)))
    link.wait(works)
    link.wait(link.start([], []))  # those without messages come along
    return [part.tolist() for part in arrived]


def test_a_message_that_is_slow_is_not_lost() -> None:
    for rank, arrived in enumerate(run_ranks(2, late_messages)):
        assert arrived == [[float(10 * sender + rank)] * (rank + 1) for sender in range(2)]


@pytest.mark.parametrize("alive", [[True, True, True], [False, True, True], [True, False, False]])
def test_balancedness_counts_surviving_ranks(alive: list[bool]) -> None:
    physical = torch.randint(1, 50, (5, 6))  # of five layers, two slots a rank
    physical[:, ~torch.tensor(alive).repeat_interleave(2)] = 0
    windows = BalanceWindows(3)
    windows.go_on(alive)
    by_rank = physical.double().view(5, 3, 2).sum(2)[:, alive]
    expected = ((by_rank.mean(1) + 1e-5) / (by_rank.amax(1) + 1e-5)).mean()
    assert windows.add(1, physical) == pytest.approx(float(expected))


# -- the detector


class Watched:
    def __init__(self, coverage: Coverage | None) -> None:
        places = RankGroupOptions(4, lambda: None, num_groups=4).places
        self.detector = FailureDetector(places, DetectorLimits(silent=3.0), coverage=coverage)
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
    ranks.detector.failed(2, "step 7 failed", peer_lost=False, generation=0)  # its step in flight
    ranks.run(8.0, silent=(0, 3))  # the lost are not missed again
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


def test_loss_without_elastic_ep_fails_the_group() -> None:
    ranks = Watched(None)
    ranks.detector.died(1, "DP1 TP1 (pid 101) was killed by SIGKILL")
    assert "SIGKILL" in str(ranks.detector.failure) and not ranks.announced


# -- the supervisor


class SupervisedRanks:
    """A supervisor whose ranks are links of this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rank_supervisor, "LocalRanks", Mock())
        monkeypatch.setattr(rank_supervisor, "open_store", lambda options, host: Mock(port=1))
        options = RankGroupOptions(3, lambda: None, num_groups=3, coverage=Coverage(4, 4))
        self.supervisor = rank_supervisor.RankSupervisor(None, options, Mock(status_path=folder / "status"))
        self.announced: list[Survivors] = []
        self.busy: dict[int, Future[Any]] = {}
        """What ranks are asked that do not answer."""
        self.links = [self._link(rank, f"ipc://{folder}/ranks") for rank in range(3)]

    def _link(self, rank: int, address: str) -> HeartbeatClient:
        def run(method: str) -> Future[Any]:
            answer: Future[Any] = self.busy.get(rank, Future())
            if rank not in self.busy:
                answer.set_result(f"{method} of {rank}")
            return answer

        hello, limits = rank_messages.Hello(rank, "here", 100 + rank), DetectorLimits(silent=60.0)
        link = HeartbeatClient(
            address,
            f"rank{rank}",
            hello,
            lambda: rank_messages.Beat(rank, Position()),
            limits,
            lambda reason: None,
            run,
            self.announced.append,
        )
        link.send(rank_messages.Loaded(rank, {}, f"core{rank}", info=replace(INFO, model_path=f"of {rank}")))
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
    supervised.supervisor._detector.died(0, "DP0 TP0 (pid 100) was killed by SIGKILL")  # before anyone listens
    until(lambda: len(supervised.announced) == 2, "the ranks were not notified")
    reported: list[messages.GroupsLost] = []

    def report(loss: messages.GroupsLost) -> None:
        reported.append(loss)
        supervised.links[1].send(rank_messages.Ended(1))

    supervised.supervisor.run(report)
    ((groups, message),) = [(loss.groups, loss.message) for loss in reported]
    assert groups == [0] and "DP0 TP0 (pid 100) was killed by SIGKILL" in message
    assert {survivors.alive for survivors in supervised.announced} == {(False, True, True)}


def test_any_rank_can_call_all_others(supervised: SupervisedRanks) -> None:
    supervised.supervisor.start()
    assert supervised.links[0].ask_others(0, "view").result(30) == ["view of 1", "view of 2"]
    supervised.supervisor._detector.died(0, "DP0 TP0 (pid 100) was killed by SIGKILL")
    until(lambda: len(supervised.announced) == 2, "the ranks were not notified")
    assert supervised.links[1].ask_others(1, "view").result(30) == ["view of 2"]


def test_replies_of_other_ranks_survive_the_loss_of_one(supervised: SupervisedRanks) -> None:
    supervised.supervisor.start()
    supervised.busy[2] = Future()
    asked = supervised.links[0].ask_others(0, "dump")
    with pytest.raises(TimeoutError):
        asked.result(0.3)
    supervised.supervisor._detector.died(2, "DP2 TP2 (pid 102) was killed by SIGKILL")
    assert asked.result(30) == ["dump of 1"]


def test_orderly_exit_is_acknowledged_before_the_rank_leaves(supervised: SupervisedRanks) -> None:
    supervised.supervisor.start()
    received = threading.Event()

    def end() -> None:
        time.sleep(0.3)  # a supervisor that is slow to read
        received.set()

    supervised.supervisor._detector.end = end  # type: ignore[method-assign]
    supervised.links[1].send(rank_messages.Ended(1))
    supervised.links[1].close(acknowledged=True)
    assert received.is_set()


# -- steps


def test_steps_restart_without_a_lost_group(tmp_path: Path) -> None:
    exchanges = [StepExchange(group, 3, f"ipc://{tmp_path}/steps-{group}") for group in range(3)]
    for exchange in exchanges:
        exchange.connect([other.address for other in exchanges])
    steps = [DPSync(exchange, lambda: None) for exchange in exchanges[:2]]
    exchanges[2].send(1, StepFacts(num_tokens=9))  # its last words
    exchanges[0].send(1, StepFacts(num_tokens=8))  # of a step that never was

    def part(group: int) -> list[tuple[StepFacts, ...] | None]:
        steps[group].regroup(1, [True, True, False])
        return [
            steps[group].sync_step(StepPlan(40 + n), StepFacts(num_tokens=10 * group + n)).dp_facts for n in range(3)
        ]

    try:
        with ThreadPoolExecutor(2) as threads:
            first, second = threads.map(part, range(2))
        expected = [(StepFacts(num_tokens=n), StepFacts(num_tokens=10 + n), LOST) for n in range(3)]
        assert first == second == expected
    finally:
        for exchange in exchanges:
            exchange.close()


def test_pause_of_a_loss_before_the_first_iteration_is_zero(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core, "time", Mock(monotonic=lambda: 5000.0))
    survivors, over = Survivors((True, False), ("DP1 TP1 (pid 101) was killed by SIGKILL",)), RuntimeError("over")
    serving = core.EngineCore(
        Mock(start_over=lambda: []),
        *(Mock() for _ in range(4)),
        eos_token_ids=frozenset(),
        check=Mock(side_effect=[RanksChanged("DP1"), over]),
        dp_sync=Mock(generation=0),
        regroup=lambda waiting: (survivors, Recovered(3, 0, 0.5)),
    )
    with pytest.raises(RuntimeError, match="over"):
        serving.run()
    assert "Serving paused for 0.00 s and goes on with 1 of 2 ranks: 3 experts copied, 0 read" in caplog.text


# -- the front end


def test_request_of_a_lost_group_migrates_with_its_tokens(tmp_path: Path) -> None:
    async def run() -> None:
        async with client_of(tmp_path, 3) as (client, (core,)):
            task = ask(client, "r", 4, lane=1)
            assert (await core.got(1)).generated_ids == []
            core.send(messages.StepOutput([messages.RequestDelta("r", [5, 6], cached_tokens=3)], group=1))
            core.send(messages.GroupsLost([1], "DP1 TP1 was killed by SIGKILL"))
            again = await core.got(0)
            assert (again.rid, again.prompt_ids, again.generated_ids, again.num_migrations) == (
                "r",
                [0, 1, 2, 3],
                [5, 6],
                1,
            )
            core.send(messages.StepOutput([messages.RequestDelta("r", [7])], group=1))  # came too late
            core.send(messages.StepOutput([messages.RequestDelta("r", [7], None, cached_tokens=6)], group=0))
            core.send(messages.GroupsLost([0], "DP0 TP0 was killed by SIGKILL"))
            last = await core.got(2)
            assert last.generated_ids == [5, 6, 7] and last.num_migrations == 2 and last.routed_dp_rank == 2
            core.send(messages.StepOutput([messages.RequestDelta("r", [8], {"type": "length", "length": 4})], group=2))
            assert await task == [5, 6, 7, 8]
            assert [health.alive for health in client.healths()] == [False, False, True] and client.health().alive
            with pytest.raises(EngineDeadError, match="DP1 TP1 was killed"):
                await ask(client, "there", 3, lane=1)
            assert all(load.num_requests == load.num_tokens == 0 for load in client._router.loads)

    asyncio.run(run())


def test_aborted_request_of_a_lost_group_does_not_migrate(tmp_path: Path) -> None:
    async def run() -> None:
        async with client_of(tmp_path, 2) as (client, (core,)):
            news: list[messages.RequestDelta] = []

            async def read() -> None:
                async for delta in client.stream(request("r", lane=1)):
                    news.append(delta)

            task = asyncio.create_task(read())
            await core.got(1)
            client.abort(["r"], reason="enough")  # its group dies before receiving it
            info = asyncio.create_task(client.call("internal_state"))
            call = await core.got(0)
            assert isinstance(call, messages.Call)
            core.send(messages.StepOutput([messages.RequestDelta("r", [5, 6], cached_tokens=3)], group=1))
            core.send(messages.GroupsLost([1], "DP1 TP1 was killed by SIGKILL"))
            await task
            assert [token for delta in news for token in delta.token_ids] == [5, 6]
            last = news[-1]
            assert last.finish is not None and last.finish["type"] == "abort" and last.finish["message"] == "enough"
            core.send(messages.Reply(call.id, value={"of": 0}))
            assert await info == [{"of": 0}]  # of the surviving schedulers
            assert core.nothing_for(0)

    asyncio.run(run())


def test_poison_request_stops_after_max_migrations(tmp_path: Path) -> None:
    async def run() -> None:
        async with client_of(tmp_path, 6, method="round_robin") as (client, (core,)):
            task = ask(client, "poison")
            for group in range(4):
                assert (await core.got(group)).num_migrations == group
                core.send(messages.GroupsLost([group], f"DP{group} died"))
            with pytest.raises(EngineDeadError, match="DP3 died; this request has lost 4 schedulers"):
                await task
            assert core.nothing_for(4) and core.nothing_for(5)

    asyncio.run(run())
