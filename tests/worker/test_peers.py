"""Results of a device that has lost a peer."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from moe_engine.parallel.collectives import PeerLost
from moe_engine.parallel.context import SINGLE
from moe_engine.types import StepResult
from moe_engine.worker.worker import _collect


@dataclass
class Watching:
    """A dispatcher whose device loses a peer during the download of results."""

    taken: bool = False

    def check_peers(self) -> None:
        if self.taken:
            raise PeerLost("ranks [1] did not come")


def test_results_without_a_peer_are_an_error():
    dispatcher: Any = Watching()

    def take() -> StepResult:
        dispatcher.taken = True
        return StepResult(0, [], [])

    future: Future[StepResult] = Future()
    _collect(SimpleNamespace(take=take), future, replace(SINGLE, dispatcher=dispatcher))
    with pytest.raises(PeerLost, match=r"ranks \[1\]"):
        future.result(0)


def test_without_peers_nothing_is_checked():
    future: Future[StepResult] = Future()
    result = StepResult(0, [], [])
    _collect(SimpleNamespace(take=lambda: result), future, SINGLE)
    assert future.result(0) is result
