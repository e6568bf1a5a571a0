"""Executor interface: how a core runs plans on its ranks, and the errors that name a lost rank."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from moe_engine.errors import EngineDeadError, MoeEngineError
from moe_engine.types import StepPlan, StepResult


class StepWorker(Protocol):
    """The part of `worker.Worker` that the loop uses."""

    def execute(self, plan: StepPlan) -> Future[StepResult]: ...

    def call_all(self, method: str) -> Future[list[Any]]: ...


class RankLost(EngineDeadError):
    """A rank of the group died, hangs or failed; names the rank and its position. The group cannot continue."""


class Survivors(msgspec.Struct, frozen=True):
    """The surviving ranks of a world. `losses`: one sentence per loss, naming ranks and causes, in order."""

    alive: tuple[bool, ...] = ()
    losses: tuple[str, ...] = ()

    @property
    def generation(self) -> int:
        return len(self.losses)


class RanksChanged(MoeEngineError):
    """Ranks were lost and the others continue: steps in flight must be restarted."""
