"""A failing worker with a second pool for windowed layers."""

from __future__ import annotations

from moe_engine.scheduler import SchedulerConfig
from moe_engine.types import StepPlan
from tests.scheduler.drafting_worker import RUBBISH
from tests.scheduler.failing_worker import FailingWorker, Poison
from tests.scheduler.windowed_worker import WindowedWorker


class FailingWindowedWorker(FailingWorker, WindowedWorker):
    """A failed step leaves arbitrary contents in its window slots; it may have applied the plan's window pages."""

    def __init__(self, config: SchedulerConfig, poison: Poison) -> None:
        WindowedWorker.__init__(self, config)
        self._begin(poison)

    def discard(self) -> None:
        super().discard()
        self.reads.clear()

    def _break_next(self) -> None:
        self.reads.popleft()
        super()._break_next()

    def _break(self, plan: StepPlan, slots: list[int]) -> None:
        super()._break(plan, slots)
        pairs = dict(zip(plan.window_pages[::2], plan.window_pages[1::2]))
        mapped = self.page_of | pairs
        self.window_pool.update((self._mapped(mapped, slot), RUBBISH) for slot in slots)
        if self.poison.rng.random() < 0.5:
            self.page_of = mapped
