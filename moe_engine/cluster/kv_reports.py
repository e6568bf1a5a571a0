"""Reports of a follower on the storage tier. Its receiving thread sends them, between plans."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from moe_engine.types import KVReport, StepPlan

IDLE_SECONDS = 0.5
STORAGE_SECONDS = 0.005


class KVReports:
    def __init__(self) -> None:
        self._reports: deque[KVReport] = deque()
        self._open: set[int] = set()
        """Planned operations without their last report."""

    def planned(self, plan: StepPlan) -> None:
        """Notes the operations of a plan. The thread of the steps begins them later, and may end them immediately."""
        if plan.kv_ops is not None:
            self._open.update(fetch.id for fetch in plan.kv_ops.fetches)
            self._open.update(backup.id for backup in plan.kv_ops.backups)

    def add(self, report: KVReport) -> None:
        """Thread-safe."""
        self._reports.append(report)

    def take(self) -> Iterator[KVReport]:
        """The reports since the last call."""
        while self._reports:
            report = self._reports.popleft()
            if report.ended:
                self._open.discard(report.id)
            yield report

    @property
    def poll_seconds(self) -> float:
        """Longest wait for the next plan: short while reports may come, so that they leave in time."""
        return STORAGE_SECONDS if self._open else IDLE_SECONDS
