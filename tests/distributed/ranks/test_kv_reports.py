"""A follower waits for plans only briefly while its storage works, from the plan on that begins an operation."""

from __future__ import annotations

import pytest

from moe_engine.cluster.kv_reports import IDLE_SECONDS, STORAGE_SECONDS, KVReports
from moe_engine.types import KVBackup, KVFetch, KVOps, KVReport, StepPlan


@pytest.mark.parametrize(
    "ops", [KVOps(fetches=[KVFetch(3, [b"a", b"b"], [])]), KVOps(backups=[KVBackup(3, [b"a", b"b"], [0, 1])])]
)
def test_a_planned_operation_shortens_the_wait_until_its_last_report(ops: KVOps) -> None:
    reports = KVReports()
    reports.planned(StepPlan(1))
    assert reports.poll_seconds == IDLE_SECONDS
    reports.planned(StepPlan(2, kv_ops=ops))
    assert reports.poll_seconds == STORAGE_SECONDS and not list(reports.take())  # the steps' thread has not begun it
    first, last = KVReport(3, 1, False), KVReport(3, 2, True)
    reports.add(first)
    assert list(reports.take()) == [first] and reports.poll_seconds == STORAGE_SECONDS
    reports.add(last)
    assert reports.poll_seconds == STORAGE_SECONDS and list(reports.take()) == [last]
    assert reports.poll_seconds == IDLE_SECONDS
