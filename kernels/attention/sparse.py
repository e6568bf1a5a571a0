"""Sparse attention of backends without a kernel of its own for it.

Legend: T query tokens, H heads, C kv_lora_rank, P rotary width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from moe_engine.kernels.attention.protocol import GQABackend, MLABackend
from moe_engine.kernels.attention.selected import Selected, SparseAttention, Turn
from moe_engine.kernels.queries import AttentionBatch, PagedQueries


@dataclass(frozen=True)
class OwnRequests:
    """Query tokens as requests of their own, and the backend's plan of these; a `RenewablePlan` if that is one."""

    queries: PagedQueries
    own: Any

    @property
    def on_device(self) -> bool:
        return bool(self.own.on_device)

    @property
    def common(self) -> bool:
        return bool(self.own.common)

    def renew(self) -> None:
        self.own.renew()


class PlansOwnRequests:
    """`PlansSelected` of a backend that attends to slots in any order, in pages of one token."""

    def __init__(self, backend: MLABackend | GQABackend) -> None:
        self._backend = backend

    def plan(self, selected: Selected) -> OwnRequests:
        """See `SparseAttention`."""
        queries = selected.queries()
        return OwnRequests(queries, self._backend.plan(AttentionBatch(queries, None)))

    def plan_in_place(self, selected: Selected) -> OwnRequests | None:
        """See `SparseAttention`."""
        queries, planner = selected.queries(), self._backend.capabilities.plan_in_place
        own = None if planner is None else planner(AttentionBatch(queries, None))
        return None if own is None else OwnRequests(queries, own)


class AbsorbsSinks(MLABackend, Protocol):
    """An `MLABackend` whose absorbed form has sinks, and no rotary channels where `value_width` is the whole width."""

    def absorbed(
        self, q: Tensor, cache: Tensor, queries: PagedQueries, scale: float, plan: Any, value_width: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`MLABackend.absorbed`; `sinks` as in `SparseRun`."""


def over_absorbed(backend: AbsorbsSinks, shifts: bool = False, turns: bool = False) -> SparseAttention:
    """Sparse attention by a backend's `absorbed`: each query token as a request of its own, on pages of one token. A
    token's result has the bits of `absorbed` over the same tokens, if the backend is batch-invariant.

    Args:
        shifts: `absorbed` takes a `Shift` too. turns: a `Turn` too.
    """

    planner = PlansOwnRequests(backend)

    def run(
        q: Tensor, cache: Tensor, selected: Selected, scale: float, plan: OwnRequests, value_width: int,
        sinks: Tensor | None = None, turn: Turn | None = None,
    ) -> Tensor:  # fmt: skip
        given = {"shift": selected.shift, "turn": turn}
        more: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return backend.absorbed(q, cache, plan.queries, scale, plan.own, value_width, sinks, **more)

    return SparseAttention(
        planner.plan, run, planner.plan_in_place, shifts=shifts, turned=run if turns else None, sinks=True
    )
