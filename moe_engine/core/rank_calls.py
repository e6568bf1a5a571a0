"""Calls on every rank of a core's group, in plan order (`collective_rpc`): pending calls and their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec

from moe_engine.errors import MoeEngineError
from moe_engine.types import KVReport, StepPlan
from moe_engine.types.token_masks import LaunchedStep

if TYPE_CHECKING:
    from moe_engine.worker.worker import Worker


class RankAnswer(msgspec.Struct, array_like=True, omit_defaults=True):
    """A rank's answer: `value`, or `error` if the call failed there."""

    rank: int
    value: Any = None
    error: str = ""

    @classmethod
    def of(cls, rank: int, done: Future[Any]) -> RankAnswer:
        """The answer of a finished call."""
        error = done.exception()
        return cls(rank, done.result()) if error is None else cls(rank, error=describe(error))


def describe(error: BaseException) -> str:
    return str(error) if isinstance(error, MoeEngineError) else f"{type(error).__name__}: {error}"


class RankCall:
    """A call that has begun on `ranks`. `add` may be called from any thread.

    Args:
        seconds: deadline; ranks without an answer then have an error.
        poll: fetches answers of other processes; called by `answers`.
    """

    def __init__(self, ranks: Sequence[int], seconds: float, poll: Callable[[], None] = lambda: None) -> None:
        self._ranks, self._seconds, self._poll = ranks, seconds, poll
        self._deadline = time.monotonic() + seconds
        self._answers: dict[int, RankAnswer] = {}

    @property
    def is_over(self) -> bool:
        """True if no answer is awaited: all have arrived, or the deadline has passed."""
        return len(self._answers) == len(self._ranks) or time.monotonic() > self._deadline

    def add(self, answer: RankAnswer) -> None:
        """Ignores ranks that were not called, and second answers."""
        if answer.rank in self._ranks:
            self._answers.setdefault(answer.rank, answer)

    def answers(self) -> list[RankAnswer] | None:
        """The answers in rank order; None before the deadline while some are missing."""
        self._poll()
        missing = [rank for rank in self._ranks if rank not in self._answers]
        if missing and time.monotonic() < self._deadline:
            return None
        late = f"no answer within {self._seconds:g} s"
        return [self._answers.get(rank) or RankAnswer(rank, error=late) for rank in self._ranks]


class SingleRank:
    """`StepWorker` of a group of one rank."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.execute = worker.execute
        self.sample, self.abandon = worker.sample, worker.abandon

    def launch(self, plan: StepPlan) -> LaunchedStep:
        return self._worker.launch(plan)

    def call_ranks(self, method: str, args: Mapping[str, Any], seconds: float) -> RankCall:
        call = RankCall([0], seconds)
        self._worker.run_call(method, args).add_done_callback(lambda done: call.add(RankAnswer.of(0, done)))
        return call

    def take_kv_reports(self) -> list[tuple[int, KVReport]]:
        return []
