"""Groups of a replica that only decode, as arrays over the groups: a step of all groups costs a few array operations.

A group is in a run while its next plans are known: all its running requests decode. Their counts grow by a token a
step, so the first and the last step determine a run.
"""

from __future__ import annotations

import numpy as np

from moe_engine.scheduler.step_sums import StepSums
from moe_engine.tuning.costs.step_cost import StepShape

NEVER = 1 << 62


class Runs:
    """Attributes:
    step: steps that have passed, of all runs. sums: their seconds.
    members: groups in a run. fresh: those whose run has no step yet.
    holding: members with waiting prompts, which leave when prompts may be computed.
    total_rows: requests that decode, of all members.
    """

    def __init__(self, num_groups: int) -> None:
        self.step = self.total_rows = 0
        self.sums = StepSums()
        self.members: set[int] = set()
        self.fresh: set[int] = set()
        self.holding: set[int] = set()
        self.waiting: set[int] = set()
        """Members with waiting prompts."""
        self._rows = np.zeros(num_groups, np.int64)
        self._context = np.zeros(num_groups, np.int64)
        """Context tokens extrapolated back to step 0."""
        self._ends = np.full(num_groups, NEVER, np.int64)
        self._next_end = NEVER
        self._most_rows = 0
        self._is_stale = False

    def join(self, group: int, shape: StepShape, limit: int, holds: bool, waits: bool) -> None:
        """Adds a group's run of at most `limit` steps; `shape`: that of the first step."""
        self.members.add(group)
        self.fresh.add(group)
        self.total_rows += shape.decode_rows
        self._rows[group] = shape.decode_rows
        self._context[group] = shape.decode_context - shape.decode_rows * self.step
        self._ends[group] = self.step + limit
        self._is_stale = True
        if waits:
            self.wait(group, holds)

    def wait(self, group: int, holds: bool) -> None:
        """Marks a member as having waiting prompts."""
        self.waiting.add(group)
        if holds:
            self.holding.add(group)

    def leave(self, group: int) -> None:
        self.members.remove(group)
        for names in (self.fresh, self.holding, self.waiting):
            names.discard(group)
        self.total_rows -= int(self._rows[group])
        self._rows[group] = self._context[group] = 0
        self._ends[group] = NEVER
        self._is_stale = True

    @property
    def most_rows(self) -> int:
        """Requests that decode in the member with most of them."""
        self._refresh()
        return self._most_rows

    @property
    def next_end(self) -> int:
        """The step at which a member must ask its scheduler again."""
        self._refresh()
        return self._next_end

    def ended(self) -> list[int]:
        """Members whose run is over."""
        if self.step < self.next_end:
            return []
        found: list[int] = np.flatnonzero(self._ends <= self.step).tolist()
        return found

    def shape(self, ahead: int = 0) -> StepShape:
        """The maximum over the members, with the tokens of all, of the step `ahead` steps after the next one."""
        self._refresh()
        context = self._context + self._rows * (self.step + ahead)
        return StepShape(self._most_rows, int(context.max()), 0, 0, 0, self.total_rows)

    def _refresh(self) -> None:
        if self._is_stale:
            self._next_end, self._most_rows = int(self._ends.min()), int(self._rows.max())
            self._is_stale = False
