"""Executor interface: how a core runs plans on its ranks, and the error that names a lost rank."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from moe_engine.errors import EngineDeadError
from moe_engine.token_masks import LaunchedStep, StepMasks
from moe_engine.types import StepPlan, StepResult


class StepWorker(Protocol):
    """The part of `worker.Worker` that the loop uses."""

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """Runs a step without late masks."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Runs a step with `StepPlan.masked` rows up to its sampling, which waits for `sample`."""

    def sample(self, masks: StepMasks) -> None:
        """Completes the launched step."""

    def abandon(self) -> None:
        """The launched step, if any, fails instead of waiting for `sample`."""

    def call_all(self, method: str) -> Future[list[Any]]: ...


class RankLost(EngineDeadError):
    """A rank of the group died, hangs or failed; names the rank and its position. The group cannot continue."""
