"""The test harness: returns results, and reports ranks that raise, die or hang within its time limit."""

from __future__ import annotations

import os

import pytest

from tests.distributed.dispatch.ranks import Ranks, RanksFailed, run_ranks
from tests.distributed.dispatch.worlds import die, fail, sleep


def test_results_come_in_the_order_of_ranks() -> None:
    assert run_ranks(3, sleep, 1, 0.05) == [0, 1, 2]


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 of 2.*ValueError: rank 1 fails on purpose"):
        run_ranks(2, fail, 1)


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(RanksFailed, match="rank 0 of 2: died with exit code -9"):
        run_ranks(2, die, 0)


def test_a_rank_that_hangs_is_killed_and_its_stack_shown() -> None:
    ranks = Ranks(2)
    ranks.call(sleep, 1, 0.0)  # they have started
    pid = ranks.pid(1)
    with pytest.raises(RanksFailed, match=r'(?s)rank 1 of 2: had not returned.*worlds.py", line \d+ in sleep'):
        ranks.call(sleep, 1, 3600.0, timeout_s=1.5)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
