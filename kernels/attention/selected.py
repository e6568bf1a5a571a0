"""The context tokens that an indexer selected for each query token, and sparse attention over them.

Legend: T query tokens, K selected tokens (at most the indexer's top-k), H heads, C kv_lora_rank, P rotary width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.attention.renewable import RenewablePlan
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.queries import PagedQueries
from moe_engine.kernels.uploads import upload


@dataclass(frozen=True)
class Shift:
    """Slots of a list that are `first` or more count as `added` more: a list of one cache for another one."""

    first: int
    added: int


@dataclass(frozen=True)
class Turn:
    """`Ops.rotate` of results, `inverse`: positions [T] int64 of the query tokens."""

    positions: Tensor
    table: RotaryTable


@dataclass(frozen=True)
class Selected:
    """The cache slots that each query token attends to. Counts are known before the selection is: a token selects
    min(visible tokens, top-k).

    Attributes:
        slots: [T, K] int32, by ascending position, then -1. Each layer with an indexer overwrites them in place.
        counts: selected tokens of each query token; `counts_device` [T] int32 has the same values.
        shift: only where `SparseAttention.shifts`.
    """

    slots: Tensor
    counts: list[int]
    counts_device: Tensor
    shift: Shift | None = None

    @classmethod
    def empty(cls, queries: PagedQueries, top_k: int) -> Selected:
        """Memory for the selection of some queries; its slots are not set.

        The counts of a draft tree are read from the device.
        """
        counts = [min(count, top_k) for count in num_visible(queries)]
        return cls._of(queries, counts, max(counts, default=0))

    @classmethod
    def of_width(cls, queries: PagedQueries, top_k: int) -> Selected:
        """`empty`, large enough for the top-k of every token: the memory of steps whose contexts differ."""
        return cls._of(queries, [min(count, top_k) for count in num_visible(queries)], top_k)

    @classmethod
    def _of(cls, queries: PagedQueries, counts: list[int], width: int) -> Selected:
        device = queries.rows.device
        slots = torch.empty((len(counts), width), dtype=torch.int32, device=device)
        return cls(slots, counts, upload(np.asarray(counts, dtype=np.int32), device))

    def queries(self) -> PagedQueries:
        """Each query token as a request of its own, whose context is its selection."""
        num = len(self.counts)
        numbers = torch.arange(num + 1, dtype=torch.int32, device=self.slots.device)
        lens, starts = self.counts_device, numbers
        return PagedQueries([1] * num, self.counts, numbers[:num], starts, lens, self.slots, 1, selected=True)


def num_visible(queries: PagedQueries) -> list[int]:
    """Context tokens that each query token sees, its own included."""
    counts: list[int] = []
    for query_len, context_len in zip(queries.query_lens, queries.context_lens):
        counts.extend(range(context_len - query_len + 1, context_len + 1))
    if queries.visible is None:
        return counts
    before = [c - q for q, c in zip(queries.query_lens, queries.context_lens) for _ in range(q)]
    return [past + (bits & (1 << 64) - 1).bit_count() for past, bits in zip(before, queries.visible.tolist())]


class SparseRun(Protocol):
    """`MLABackend.absorbed` over the selected rows of the cache."""

    def __call__(
        self, q: Tensor, cache: Tensor, selected: Selected, scale: float, plan: Any, value_width: int,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """q [T, H, C+P], cache [num_slots, C+P] -> [T, H, C].

        Args:
            value_width: C. P may be 0: a row is key and value as a whole (DeepSeek V4).
            sinks: float32 [H], a logit of each head that takes part in the softmax of every query and has no value.

        Raises:
            ValueError: P is 0 or `sinks` is given, and `SparseAttention.sinks` is False.
        """


class PlansSelected(Protocol):
    """The plans of attention over selected tokens: of `SparseAttention`, or of `sparse.PlansOwnRequests`."""

    @property
    def plan(self) -> Callable[[Selected], Any]:
        """See `SparseAttention`."""

    @property
    def plan_in_place(self) -> Callable[[Selected], RenewablePlan | None] | None:
        """See `SparseAttention`."""


class TurnedRun(Protocol):
    """`SparseRun`, and a `Turn` of its results."""

    def __call__(
        self, q: Tensor, cache: Tensor, selected: Selected, scale: float, plan: Any, value_width: int,
        sinks: Tensor | None = None, turn: Turn | None = None,
    ) -> Tensor: ...  # fmt: skip


@dataclass(frozen=True)
class SparseAttention:
    """MLA over selected tokens; reads no other row of the cache."""

    plan: Callable[[Selected], Any]
    """Host work, once per step, before the slots are set."""

    run: SparseRun

    plan_in_place: Callable[[Selected], RenewablePlan | None] | None = None
    """`plan` at fixed addresses, for captured launches (`AttentionCapabilities.plan_in_place`): `selected` is large
    enough for all counts; its lists and tensors are overwritten at later steps, and `renew` applies them."""

    shifts: bool = False
    """`run` supports `Selected.shift`."""

    turned: TurnedRun | None = None
    """`run` and a `Turn` of the results by interleaved pairs, without a launch of its own."""

    sinks: bool = False
    """`run` supports sinks and rows that are values as a whole. The row in `kernels.tables` has a field of this
    name."""
