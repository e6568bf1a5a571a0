"""A fake worker with states: each row has the hash of the tokens in its state, each snapshot a copy."""

from __future__ import annotations

from moe_engine.scheduler import SchedulerConfig
from moe_engine.types import StepPlan, StepResult
from tests.scheduler.drafting_worker import RUBBISH
from tests.scheduler.failing_worker import FailingWorker, Poison
from tests.scheduler.simulator import FakeWorker, prefix_hashes


class StateWorker(FakeWorker):
    """Checks that a row's state contains exactly the tokens before the step's."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.states: dict[int, int] = {}
        self.snapshots: dict[int, int] = {}

    def execute(self) -> StepResult:
        plan = self.queue[0]
        self.set_states(plan)
        result = super().execute()
        for row, start, count in zip(plan.rows, plan.starts, plan.counts):
            hashes = [0, *prefix_hashes(self.rows[row].tokens[: start + count])]
            assert self.states[row] == hashes[start], "a state lacks the tokens before the step's"
            self.states[row] = hashes[-1]
        for row, length, slot in plan.state_ops.cuts if plan.state_ops is not None else ():
            start = plan.starts[plan.rows.index(row)]
            assert start < length <= start + plan.counts[plan.rows.index(row)]
            self.snapshots[slot] = prefix_hashes(self.rows[row].tokens[:length])[-1]
        return result

    def set_states(self, plan: StepPlan) -> None:
        """The saves of a plan, then the states of its new rows."""
        for row, slot in plan.state_ops.saves if plan.state_ops is not None else ():
            assert 0 <= slot < self.config.num_snapshots
            self.snapshots[slot] = self.states[row]
        for new in plan.new_rows:
            assert (new.snapshot >= 0) == bool(new.slots)
            self.states[new.row] = self.snapshots[new.snapshot] if new.snapshot >= 0 else 0


class FailingStateWorker(FailingWorker, StateWorker):
    """A failed step leaves arbitrary contents in the states and snapshots that it stores, and may have stored its
    saves."""

    def __init__(self, config: SchedulerConfig, poison: Poison) -> None:
        StateWorker.__init__(self, config)
        self._begin(poison)

    def _break(self, plan: StepPlan, slots: list[int]) -> None:
        super()._break(plan, slots)
        self.states.update((row, RUBBISH) for row in [*plan.rows, *(new.row for new in plan.new_rows)])
        if plan.state_ops is not None:
            self.snapshots.update((slot, RUBBISH) for _, _, slot in plan.state_ops.cuts)
            self.snapshots.update((slot, RUBBISH) for _, slot in plan.state_ops.saves)
