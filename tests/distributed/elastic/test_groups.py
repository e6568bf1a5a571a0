"""Groups of the surviving ranks: sizes stay, lost ranks send no data, operations can be aborted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_engine.elastic.groups import POLL_INTERVAL, AbortableGroup, ElasticWorld, SurvivorGroup
from moe_engine.parallel.collectives import Group, PeerLost, SingleRank
from moe_engine.parallel.dispatch.expert_ids import without_lost
from moe_engine.parallel.recording.balance_windows import BalanceWindows
from tests.distributed.dispatch.ranks import run_ranks


class Threads(SingleRank):
    """A group of this process's threads; implements only the primitive operations."""

    def __init__(self, rank: int, desk: list[Any], meet: threading.Barrier) -> None:
        super().__init__()
        self.size, self.rank = len(desk), rank
        self._desk, self._meet = desk, meet

    def _exchange(self, mine: Any) -> list[Any]:
        self._desk[self.rank] = mine
        self._meet.wait(60)
        all_of_them = list(self._desk)
        self._meet.wait(60)
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
        """Rank r sends r + 1 rows to each live rank."""
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
    """The data of each rank; the last rank is slower than one wait."""
    world = ElasticWorld(2, rank, 20.0, "cpu", ("world",))
    link = world.link()
    if rank == 1:
        time.sleep(4 * POLL_INTERVAL.total_seconds())
    arrived = [torch.zeros(rank + 1, dtype=torch.float64) for _ in range(2)]
    sends = [(peer, torch.full((peer + 1,), float(10 * rank + peer), dtype=torch.float64)) for peer in range(2)]
    works = link.start(sends, list(enumerate(arrived)))
    link.wait(works)
    link.wait(link.start([], []))  # ranks without messages take part in the exchange
    return [part.tolist() for part in arrived]


def test_a_message_that_is_slow_is_not_lost() -> None:
    for rank, arrived in enumerate(run_ranks(2, late_messages)):
        assert arrived == [[float(10 * sender + rank)] * (rank + 1) for sender in range(2)]


def break_off(rank: int) -> list[str]:
    """Rank 0 waits in one group for a lost rank, and then uses this group and another of its set."""
    given_up = threading.Event()
    made = [dist.new_group([0, 1], timeout=timedelta(seconds=60)) for _ in range(2)]
    groups = [AbortableGroup(group, 1.0, "cpu", None, given_up) for group in made]
    errors = []
    for group in (groups[0], groups[0], groups[1]) if rank == 0 else ():
        try:
            group.all_to_all(torch.zeros(2), torch.zeros(2))
        except PeerLost as error:
            errors.append(str(error))
    return errors


def test_no_message_is_sent_after_a_failed_operation() -> None:
    """A peer in the current step must not receive a message of the next step."""
    failed, same, other = run_ranks(2, break_off)[0]
    assert "all_to_all failed on rank 0 of 2" in failed and "aborts" not in failed
    assert "aborts" in same and "aborts" in other


@pytest.mark.parametrize("alive", [[True, True, True], [False, True, True], [True, False, False]])
def test_balancedness_counts_surviving_ranks(alive: list[bool]) -> None:
    physical = torch.randint(1, 50, (5, 6))  # five layers, two slots per rank
    physical[:, ~torch.tensor(alive).repeat_interleave(2)] = 0
    windows = BalanceWindows(3)
    windows.go_on(alive)
    by_rank = physical.double().view(5, 3, 2).sum(2)[:, alive]
    expected = ((by_rank.mean(1) + 1e-5) / (by_rank.amax(1) + 1e-5)).mean()
    assert windows.add(1, physical) == pytest.approx(float(expected))
