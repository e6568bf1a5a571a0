"""Failing workers: at a position of a request, for a pair of requests in one step, or at random.

A failed step may have applied its plan's rows, and leaves arbitrary contents in every slot that it should write. The
next planned step is not run.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from moe_engine.scheduler import RequestEvent, SchedulerConfig
from moe_engine.types import StepPlan, StepResult
from tests.scheduler.drafting_worker import RUBBISH, DraftingRow, DraftingWorker
from tests.scheduler.simulator import FakeWorker, Row, Simulation, prefix_hashes


class StepFailed(Exception):
    """The error of a failed step."""


class Poison:
    """The failing steps.

    Args:
        positions: by rid, the position whose computation fails.
        pairs: rids whose common step fails.
        chance: failure probability of any other step with several requests.
    """

    def __init__(
        self, seed: int, positions: Mapping[str, int], pairs: set[frozenset[str]] = frozenset(), chance: float = 0.0
    ) -> None:
        self.rng = random.Random(seed)
        self.positions, self.pairs, self.chance = positions, pairs, chance
        self.failures = 0

    def fails(self, rids: list[str], spans: list[tuple[int, int]]) -> bool:
        """True if a step that computes tokens [start, end) of each request fails."""
        fails = any(start <= self.positions.get(rid, -1) < end for rid, (start, end) in zip(rids, spans))
        fails |= any(pair <= set(rids) for pair in self.pairs)
        fails |= len(rids) > 1 and self.rng.random() < self.chance
        self.failures += fails
        return fails


class _Failing:
    """Mixin of a fake worker: failed steps."""

    poison: Poison
    rows: dict[int, Any]
    pool: dict[int, int]
    queue: Any

    def _begin(self, poison: Poison) -> None:
        self.poison = poison
        self.rids: dict[int, str] = {}

    def execute(self) -> StepResult:
        if self._fails(self.queue[0]):
            self._break_next()
            raise StepFailed("a poisoned request")
        result: StepResult = super().execute()  # type: ignore[misc]  # of the worker beside this class
        return result

    def _fails(self, plan: StepPlan) -> bool:
        """True if the plan fails; its rows are known at that time."""
        self.rids.update({new.row: new.rid for new in plan.new_rows})
        starts = [self._start_of(plan, i) for i in range(len(plan.rows))]
        spans = [(start, start + count) for start, count in zip(starts, plan.counts)]
        return self.poison.fails([self.rids[row] for row in plan.rows], spans)

    def _start_of(self, plan: StepPlan, i: int) -> int:
        return plan.starts[i]

    def _break(self, plan: StepPlan, slots: list[int]) -> None:
        if self.poison.rng.random() < 0.5:
            for row in plan.finished_rows:
                self.rows.pop(row, None)
            for new in plan.new_rows:
                self.rows[new.row] = self._row(list(new.token_ids), list(new.slots))
            for write in plan.row_writes:
                self.rows[write.row].slots[write.start : write.start + len(write.slots)] = write.slots
        self.pool.update(dict.fromkeys(slots, RUBBISH))

    def _row(self, tokens: list[int], slots: list[int]) -> Any:
        raise NotImplementedError

    def discard(self) -> None:
        """Discards the step after a failed step."""
        self.queue.clear()

    def _break_next(self) -> None:
        raise NotImplementedError


class FailingWorker(_Failing, FakeWorker):
    def __init__(self, config: SchedulerConfig, poison: Poison) -> None:
        FakeWorker.__init__(self, config)
        self._begin(poison)

    def discard(self) -> None:
        super().discard()
        self.touched.clear()

    def _break_next(self) -> None:
        self.touched.popleft()
        plan = self.queue.popleft()
        self._break(plan, plan.slots)

    def _row(self, tokens: list[int], slots: list[int]) -> Row:
        return Row(tokens, slots)

    def _update_rows(self, plan: StepPlan) -> None:
        _forget_first(self.rows, plan)
        super()._update_rows(plan)


class FailingDraftingWorker(_Failing, DraftingWorker):
    def __init__(self, config: SchedulerConfig, seed: int, luck: float, poison: Poison) -> None:
        DraftingWorker.__init__(self, config, seed, luck)
        self._begin(poison)

    def _row(self, tokens: list[int], slots: list[int]) -> DraftingRow:
        return DraftingRow(tokens, slots, len(slots), prefix_hashes(tokens[: len(slots)]))

    def _update_rows(self, plan: StepPlan) -> None:
        _forget_first(self.rows, plan)
        super()._update_rows(plan)

    def _start_of(self, plan: StepPlan, i: int) -> int:
        is_decode = i < plan.num_decodes and plan.rows[i] in self.rows
        return self.rows[plan.rows[i]].computed if is_decode else plan.starts[i]

    def _break_next(self) -> None:
        plan = self.queue.popleft()
        slots = [slot for _, start, some in self._given(plan) for slot in some]
        for i in range(plan.num_decodes):
            state = self.rows.get(plan.rows[i])
            if isinstance(state, DraftingRow):
                slots += state.slots[state.computed :]
        self._break(plan, slots)
        for slot in slots:
            self.drafter_pool.pop(slot, None)


def _forget_first(rows: dict[int, Any], plan: StepPlan) -> None:
    """Accepts rows that are released twice, and rows that a failed step had already added."""
    for new in plan.new_rows:
        if new.row not in plan.finished_rows:
            assert new.row not in rows, "a row was reused before its release"
    for row in plan.finished_rows:
        rows.setdefault(row, None)


class FailingSimulation(Simulation):
    """Reports failed steps to the scheduler, as the core does. `status`: of requests that ended with an error."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.status: dict[str, int | None] = {}
        super().__init__(*args, **kwargs)

    def take(self, events: list[RequestEvent]) -> None:
        for event in events:
            if event.finish_reason is not None and event.finish_reason.type == "abort":
                self.status[event.rid] = event.finish_reason.status_code
        super().take(events)

    def finish_one(self) -> None:
        assert isinstance(self.worker, _Failing)
        number, last = self.worker.queue[0].number, self.worker.queue[-1].number
        try:
            result = self.worker.execute()
        except StepFailed as error:
            self.worker.discard()
            self.take(self.scheduler.step_failed(number, str(error)))
            assert self.scheduler.kv_cache.step > last, "the next number belongs to a later step"
            self.worker.last_number = self.scheduler.kv_cache.step  # type: ignore[attr-defined]
            assert self.scheduler.check_integrity() == []
            return
        self.take(self.scheduler.update(result))
