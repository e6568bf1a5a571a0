"""Which losses of ranks are survivable, by expert slots. Imports neither torch nor numpy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coverage:
    """Losses that the spare expert slots can absorb.

    `slots`: expert slots per rank and layer.
    """

    num_experts: int
    slots: int

    def covers(self, num_ranks: int) -> bool:
        """True if `num_ranks` ranks have slots for every expert."""
        return num_ranks * self.slots >= self.num_experts

    def redundant_needed(self, num_left: int, num_ranks: int) -> int:
        """Value of ``--ep-num-redundant-experts`` with which `num_left` of the ranks suffice."""
        return -(-self.num_experts // num_left) * num_ranks - self.num_experts
