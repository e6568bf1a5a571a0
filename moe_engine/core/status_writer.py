"""What a core writes into the shared status: loop iterations, last step, load."""

from __future__ import annotations

import time

from moe_engine.core.shared_status import SharedStatus
from moe_engine.core.step_reporter import StepReporter
from moe_engine.scheduler.scheduler import Scheduler

STATUS_INTERVAL_SECONDS = 0.05
"""Least interval between two updates of the load. It is also written when the core becomes idle or only waits, and in
that state by each turn after the interval: requests arrive during a pause."""


class StatusWriter:
    """Called on the core's thread."""

    def __init__(self, status: SharedStatus, scheduler: Scheduler, reporter: StepReporter) -> None:
        self._status = status
        self._scheduler = scheduler
        self._reporter = reporter
        self._busy = False
        self._step_number = 0
        self._load_written = 0.0

    def turn(self, busy: bool) -> None:
        """An iteration of the loop begins; `busy`: there is work."""
        now = time.monotonic()
        stops = self._busy and not busy
        if busy != self._busy:
            self._busy = busy
            self._status.write(busy_since=now if busy else 0.0)
        if stops:
            self._reporter.idle()
        if stops or (not busy and now - self._load_written > STATUS_INTERVAL_SECONDS):
            self._write_load()
        self._status.write(last_turn=now)

    def step_ended(self, number: int) -> None:
        self._step_number = number
        now = time.monotonic()
        if now - self._load_written > STATUS_INTERVAL_SECONDS:
            self._write_load()
        else:
            self._status.write(step=number, step_end=now)

    def _write_load(self) -> None:
        stats = self._scheduler.stats()
        now = self._load_written = time.monotonic()
        self._status.write(
            step=self._step_number,
            step_end=now,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_used_tokens=stats.num_used,
            token_usage=stats.token_usage,
            gen_throughput=self._reporter.gen_throughput,
            cache_hit_rate=stats.cache_hit_rate,
            num_retracted=stats.num_retracted,
            new_token_ratio=stats.new_token_ratio,
            oldest_queued=now - stats.oldest_wait_seconds if stats.num_waiting else 0.0,
        )
