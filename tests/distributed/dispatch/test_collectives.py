"""The group wrapper over gloo ranks, the group of one, and the error after the loss of a peer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from moe_engine.parallel.collectives import SingleRank
from tests.distributed.dispatch.ranks import Ranks, run_ranks
from tests.distributed.dispatch.worlds import group_operations, join_shared_segment, run_until_broken
from tests.waiting import until


@pytest.mark.parametrize("shared", [False, True])
def test_operations_of_three_ranks(shared: bool) -> None:
    n = 3
    for rank, found in enumerate(run_ranks(n, group_operations, shared)):
        fillings = [[7 + source] * source + [0] * (n - source if source != rank else 0) for source in range(n)]
        assert found == {
            "shorter": [value for filling in fillings for value in filling],
            "ints": [10 * source + rank for source in range(n)],
            "all_to_all": [float(source) for source in range(n) for _ in range(rank + 1)],
            "all_gather": [[source, -source] for source in range(n)],
            "reduce_scatter": [3.0, 3.0],
            "broadcast": [n - 1] * 2,
        }


def test_the_group_of_one_does_the_same() -> None:
    group = SingleRank()
    x = torch.arange(6.0).view(3, 2)
    out = torch.empty_like(x)
    group.all_to_all(out, x, [3], [3])
    assert torch.equal(out, x)
    assert torch.equal(group.all_gather(x), x[None]) and torch.equal(group.reduce_scatter(x[None]), x)
    assert group.exchange_ints([7]) == [7]


def test_a_shared_segment_joins_ranks_and_leaves_no_name() -> None:
    assert run_ranks(3, join_shared_segment) == [[100, 101, 102]] * 3


@pytest.mark.parametrize("backend", ["all_to_all", "shared_memory"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_peer_is_an_error_that_names_the_operation(backend: str, how: signal.Signals, tmp_path: Path) -> None:
    """A killed rank is reported long before the timeout, a hung rank at the timeout."""
    timeout_s = 60.0 if how == signal.SIGKILL else 2.0
    with Ranks(3) as ranks:
        going = tmp_path / "going"
        ranks.start(run_until_broken, backend, timeout_s, str(going))
        until(going.exists)
        os.kill(ranks.pid(1), how)
        results = ranks.finish(timeout_s=60.0, expect_dead=(1,))
    for rank in (0, 2):
        message, waited = results[rank]
        operation = "all_to_all" if backend == "all_to_all" else "through shared memory"
        assert operation in message and f"rank {rank}" in message, message
        if backend == "shared_memory":  # this backend names the rank, and whether it is dead or late
            assert ("ranks [1] have died" if how == signal.SIGKILL else "ranks [1] did not arrive") in message, message
        assert waited < 50
