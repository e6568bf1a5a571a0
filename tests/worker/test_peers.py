"""Results that a device computed without one of its peers."""

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
    """A dispatcher whose device gives up a peer while the results are on their way."""

    taken: bool = False

    def check_peers(self) -> None:
        if self.taken:
            raise PeerLost("ranks [1] did not come")


def test_they_are_an_error_and_no_answer():
    dispatcher: Any = Watching()

    def take() -> StepResult:
        dispatcher.taken = True
        return StepResult(0, [], [])

    future: Future[StepResult] = Future()
    _collect(SimpleNamespace(take=take), future, replace(SINGLE, dispatcher=dispatcher))
    with pytest.raises(PeerLost, match=r"ranks \[1\]"):
        future.result(0)


def test_without_peers_there_is_nothing_to_ask():
    future: Future[StepResult] = Future()
    result = StepResult(0, [], [])
    _collect(SimpleNamespace(take=lambda: result), future, SINGLE)
    assert future.result(0) is result
