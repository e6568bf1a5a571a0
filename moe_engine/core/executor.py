"""Executor interface: how a core runs plans on its ranks, and the error that names a lost rank."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from moe_engine.core.rank_calls import RankCall
from moe_engine.errors import EngineDeadError
from moe_engine.types import KVReport, StepPlan, StepResult
from moe_engine.types.token_masks import LaunchedStep, StepMasks


class StepWorker(Protocol):
    """Runs steps and calls on the ranks of a core's group, in the order of submission."""

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """Runs a step without late masks."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Runs a step with `StepPlan.masked` rows up to its sampling, which waits for `sample`."""

    def sample(self, masks: StepMasks) -> None:
        """Completes the launched step."""

    def abandon(self) -> None:
        """The launched step, if any, fails instead of waiting for `sample`."""

    def call_ranks(self, method: str, args: Mapping[str, Any], seconds: float) -> RankCall:
        """Begins one of `worker.rank_methods` on every rank, after the steps submitted so far."""

    def take_kv_reports(self) -> list[tuple[int, KVReport]]:
        """Progress of the storage on the other ranks since the last call: (rank, report)."""


class RankLost(EngineDeadError):
    """A rank of the group died, hangs or failed; names the rank and its position. The group cannot continue."""
