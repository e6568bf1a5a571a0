"""Which ranks a model can do without, by the room for its experts. Imports neither torch nor numpy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coverage:
    """Which losses the experts' spare slots make up for.

    `slots`: of experts on each rank, in every layer.
    """

    num_experts: int
    slots: int

    def covers(self, num_ranks: int) -> bool:
        """Whether so many ranks have room for every expert."""
        return num_ranks * self.slots >= self.num_experts

    def redundant_needed(self, num_left: int, num_ranks: int) -> int:
        """``--ep-num-redundant-experts`` with which `num_left` of the ranks would do."""
        return -(-self.num_experts // num_left) * num_ranks - self.num_experts
