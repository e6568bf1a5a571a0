"""Plans of a captured step for every cache group of the model: layers with different attention windows have different
queries over the same tokens, and a bounded window has a slot table of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from moe_engine.kernels.attention.renewable import InPlacePlanner, RenewablePlan
from moe_engine.kernels.queries import AttentionBatch
from moe_engine.models.batch import ForwardBatch


@dataclass(frozen=True)
class AttentionWindows:
    """Windows of a model's cache groups, the first group first; None: all positions. `table`: slot table of windowed
    layers, if their KV is bounded."""

    windows: tuple[int | None, ...] = (None,)
    table: Tensor | None = None

    @property
    def first(self) -> int | None:
        return self.windows[0]

    def table_of(self, window: int | None, slot_table: Tensor) -> Tensor:
        """The slot table of a group, `slot_table` that of layers without a window."""
        return slot_table if window is None or self.table is None else self.table


ALL_POSITIONS = AttentionWindows()


@dataclass(frozen=True)
class GroupPlans:
    """`RenewablePlan` of all groups. `others`: queries and plan of the groups after the first, by window."""

    first: RenewablePlan
    others: dict[int | None, tuple[AttentionBatch, RenewablePlan]]

    @classmethod
    def of(
        cls, attention: AttentionBatch, planner: InPlacePlanner, windows: AttentionWindows, slot_table: Tensor
    ) -> GroupPlans | None:
        """Plans for queries of the first group; None if one of the groups has no plan in place."""
        first, others = planner(attention), {}
        for window in windows.windows[1:]:
            own = attention.with_window(window, windows.table_of(window, slot_table))
            plan = planner(own)
            if plan is None:
                return None
            others[window] = own, plan
        return None if first is None else cls(first, others)

    @property
    def _all(self) -> Sequence[RenewablePlan]:
        return [self.first, *(plan for _, plan in self.others.values())]

    @property
    def on_device(self) -> bool:
        return all(plan.on_device for plan in self._all)

    @property
    def common(self) -> bool:
        return all(plan.common for plan in self._all)

    def renew(self) -> None:
        """Groups share the list of context lengths."""
        for plan in self._all:
            plan.renew()

    def planned(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch with these plans."""
        return replace(batch, attention_plan=self.first, other_groups=self.others)
