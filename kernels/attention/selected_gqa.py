"""Grouped-query attention over selected tokens, the same for all heads: each query token is a request of its own, with
the list of its slots as its row of the slot table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_engine.kernels.attention.protocol import GQABackend
from moe_engine.kernels.attention.renewable import RenewablePlan
from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.queries import AttentionBatch, PagedQueries


@dataclass(frozen=True)
class SelectedPlan:
    """The query tokens as requests, and the backend's plan of these."""

    rows: PagedQueries
    plan: Any


@dataclass(frozen=True)
class RenewableSelectedPlan:
    """`SelectedPlan` at fixed addresses; implements `RenewablePlan`."""

    rows: PagedQueries
    plan: RenewablePlan

    @property
    def on_device(self) -> bool:
        return self.plan.on_device

    @property
    def common(self) -> bool:
        return self.plan.common

    def renew(self) -> None:
        self.plan.renew()


class SelectedGQA:
    """`PlansSelected` of a backend: plans are `SelectedPlan` or `RenewableSelectedPlan`."""

    def __init__(self, backend: GQABackend) -> None:
        self._backend = backend

    def plan(self, selected: Selected) -> SelectedPlan:
        """See `SparseAttention`."""
        rows = selected.queries()
        return SelectedPlan(rows, self._backend.plan(AttentionBatch(rows, None)))

    @property
    def plan_in_place(self) -> Callable[[Selected], RenewablePlan | None] | None:
        """See `SparseAttention`."""
        planner = self._backend.capabilities.plan_in_place
        if planner is None:
            return None

        def plan(selected: Selected) -> RenewablePlan | None:
            rows = selected.queries()
            found = planner(AttentionBatch(rows, None))
            return None if found is None else RenewableSelectedPlan(rows, found)

        return plan
