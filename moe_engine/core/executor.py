"""What a core needs of the ranks behind it: plans in, results out, and the errors that name a lost rank."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from moe_engine.errors import EngineDeadError, MoeEngineError
from moe_engine.types import StepPlan, StepResult


class StepWorker(Protocol):
    """The part of `worker.Worker` the loop uses."""

    def execute(self, plan: StepPlan) -> Future[StepResult]: ...

    def call_all(self, method: str) -> Future[list[Any]]: ...


class RankLost(EngineDeadError):
    """A rank of the group died, hangs or failed; names it and where it was. The group cannot go on."""


class Survivors(msgspec.Struct, frozen=True):
    """Who of a world is left. `losses` says who went and how, time after time."""

    alive: tuple[bool, ...] = ()
    losses: tuple[str, ...] = ()

    @property
    def generation(self) -> int:
        return len(self.losses)


class RanksChanged(MoeEngineError):
    """Ranks were lost, and the others go on without them: what is under way must begin anew."""
