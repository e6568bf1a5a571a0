"""Plans of EPLB: from the experts' counts to a new placement and the moves that lead to it, while steps run.

Legend: L layers, E logical experts.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_engine.parallel.placement.balance import balancedness
from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.placement.moves import plan_moves
from moe_engine.parallel.placement.placement import ExpertPlacement
from moe_engine.parallel.placement.policies import MIN_GAIN, plan_placement
from moe_engine.parallel.placement.program import encode_moves


@dataclass(frozen=True)
class Plan:
    """The encoded moves, and the balancedness of the counted passes before and after them.

    Attributes:
        unmoved: balancedness of those passes if the last plan had moved no expert; None: there was no plan.
    """

    program: NDArray[np.int64]
    before: float = 1.0
    after: float = 1.0
    unmoved: float | None = None


NO_MOVES = Plan(np.zeros(1, dtype=np.int64))


class Planner:
    """Plans placements concurrently with steps, on the planning rank. `close` waits for the running plan."""

    def __init__(self, layout: ExpertLayout, policy: str, executor: Executor) -> None:
        self.executor = executor
        self._layout = layout
        self._policy = policy
        self._last: ExpertPlacement | None = None
        """Placement before the last plan that moved experts."""

    def submit(self, counts: NDArray[np.int64], current: ExpertPlacement, enough: float) -> Future[Plan]:
        """A plan for counts [L, E], without moves if the balancedness is already above `enough`."""
        return self.executor.submit(self.plan, counts, current, enough)

    def plan(self, counts: NDArray[np.int64], current: ExpertPlacement, enough: float) -> Plan:
        if not counts.any():
            return NO_MOVES
        before = self.balancedness(current, counts)
        unmoved = None if self._last is None else self.balancedness(self._last, counts)
        if before > enough:
            return Plan(NO_MOVES.program, before, before, unmoved)
        new = self.place(counts, current)
        moves = plan_moves(current, new, num_nodes=self._layout.num_nodes)
        self._last = current
        return Plan(encode_moves(moves), before, self.balancedness(new, counts), unmoved)

    def balancedness(self, placement: ExpertPlacement, counts: NDArray[np.int64]) -> float:
        return balancedness(placement, counts)

    def place(self, counts: NDArray[np.int64], current: ExpertPlacement) -> ExpertPlacement:
        """The new placement."""
        return plan_placement(counts, self._layout, self._policy, current, MIN_GAIN)

    def close(self) -> None:
        self.executor.shutdown(cancel_futures=True)
