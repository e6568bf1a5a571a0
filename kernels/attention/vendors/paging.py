"""A group of queries in the libraries' formats: tables or lists of pages, lengths on the host and on the device.

Everything is built once per step, without device synchronization: sizes come from the host's lists, page numbers are
gathered on the device. Requests without query tokens are left out, since no library documents support for them.

Legend: R requests with query tokens, T their query tokens, W pages of the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.uploads import pinned, upload

Made = TypeVar("Made")

TABLE = "table"
"""`StepPlan` key of a group's page table."""

SLOTS = "slots"
"""`StepPlan` key of the slots of a group's contexts."""


@dataclass(frozen=True)
class Paged:
    """Some requests of a step.

    `kv_lens` are the tokens to attend to: the whole context, or with `before` the tokens before the query tokens, at
    least 1 (if there are none, the caller ignores the result).
    """

    query_lens: list[int]
    kv_lens: list[int]
    rows: Tensor  # [R] int32
    query_starts: Tensor  # [R+1] int32
    kv_lens_device: Tensor  # [R] int32
    slot_table: Tensor
    page_size: int

    @classmethod
    def of(cls, queries: PagedQueries, page_size: int | None = None, before: bool = False) -> Paged:
        """page_size: tokens per requested page; must divide the pool's page size. Default: the pool's.

        Raises:
            ValueError: the pool's pages cannot be divided this way.
        """
        page_size = page_size or queries.page_size
        if queries.page_size % page_size:
            raise ValueError(f"pages of {queries.page_size} tokens cannot be read as pages of {page_size}")
        rows, starts, kv_device = queries.rows, queries.query_starts, queries.context_lens_device
        query_lens, kv_lens = queries.query_lens, queries.context_lens
        if before:
            kv_lens = [max(1, kv - count) for kv, count in zip(kv_lens, query_lens)]
            kv_device = (kv_device - starts.diff()).clamp_min(1)
        if 0 in query_lens:
            live = [i for i, count in enumerate(query_lens) if count]
            index = upload(np.array(live), rows.device)
            rows, kv_device = rows[index], kv_device[index]
            starts = torch.cat((starts[index], starts[-1:]))
            query_lens, kv_lens = [query_lens[i] for i in live], [kv_lens[i] for i in live]
        return cls(
            query_lens, kv_lens, rows, starts.to(torch.int32), kv_device.to(torch.int32).contiguous(),
            queries.slot_table, page_size,
        )  # fmt: skip

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @cached_property
    def num_pages(self) -> list[int]:
        """Per request."""
        return [-(-kv // self.page_size) for kv in self.kv_lens]

    @cached_property
    def table(self) -> Tensor:
        """[R, W] int32: page numbers; a request's columns after its last page are unspecified."""
        firsts = self._first_slots
        return firsts if self.page_size == 1 else firsts.div(self.page_size, rounding_mode="floor")

    def write_table(self, out: Tensor) -> None:
        """`table` into the first columns of `out` [R, W or more]."""
        if self.page_size == 1:
            first = self._columns
            torch.index_select(first, 0, self.rows, out=out[:, : first.shape[1]])
        else:
            firsts = self._first_slots
            torch.div(firsts, self.page_size, rounding_mode="floor", out=out[:, : firsts.shape[1]])

    @property
    def _first_slots(self) -> Tensor:
        """[R, W] int32: the first slot of each page."""
        return self._columns.index_select(0, self.rows)

    @property
    def _columns(self) -> Tensor:
        """The slot table's columns of the first slots of pages."""
        size, width = self.page_size, max(self.num_pages)
        return self.slot_table[:, : (width - 1) * size + 1 : size]

    @cached_property
    def flat(self) -> Tensor:
        """[sum of num_pages] int32: the page numbers of all requests, concatenated.

        By the lengths on the host, as the libraries' offsets are: those on the device may not be set yet.
        """
        table, total = self.table, sum(self.num_pages)
        count = upload(np.asarray(self.num_pages), self.rows.device)
        request = torch.repeat_interleave(torch.arange(len(count), device=count.device), count, output_size=total)
        column = torch.arange(total, device=count.device) - (count.cumsum(0) - count)[request]
        return table[request, column]


def prefix_sums(lens: list[int], device: torch.device) -> Tensor:
    """[len(lens) + 1] int32 in host memory that a device copy does not wait for."""
    return host_ints(np.cumsum([0, *lens]), device)


def host_ints(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """`values` as int32 in the same kind of memory as `prefix_sums`."""
    return pinned(np.asarray(values, dtype=np.int32), device)


class StepPlan:
    """Adapter data of a step's groups, keyed by group. Built once, at first use."""

    def __init__(self, batch: AttentionBatch) -> None:
        self._groups: dict[int, tuple[PagedQueries, dict[Any, Any]]] = {}
        for queries in (batch.decode, batch.prefill):
            if queries is not None:
                self._groups[id(queries)] = (queries, {})

    def get(self, queries: PagedQueries, key: Any, make: Callable[[], Made]) -> Made:
        """`make()`, or its cached result for this group and key."""
        known = self._groups.setdefault(id(queries), (queries, {}))[1]
        if key not in known:
            known[key] = make()
        return known[key]


def plan_of(plan: Any) -> StepPlan:
    """The step's plan, or an empty plan if the caller passes another type."""
    return plan if isinstance(plan, StepPlan) else StepPlan(AttentionBatch(None, None))


def slots_of(queries: PagedQueries) -> Tensor:
    """Slots of all context tokens of all requests, concatenated: [S] int64."""
    lens = queries.context_lens_device.long()
    total = queries.num_context_tokens
    request = torch.repeat_interleave(torch.arange(len(lens), device=lens.device), lens, output_size=total)
    position = torch.arange(total, device=lens.device) - (lens.cumsum(0) - lens)[request]
    return queries.slot_table[queries.rows.long()[request], position].long()


def gathered_slots(plan: Any, queries: PagedQueries) -> Tensor:
    """`slots_of`, or the slots of the context chunk that the plan holds."""
    queries.refuse_tree("gathered")
    return plan_of(plan).get(queries, SLOTS, lambda: slots_of(queries))


def as_pages(cache: Tensor, page_size: int) -> Tensor:
    """cache [slots, *] -> [pages, page_size, *], a view."""
    return cache.unflatten(0, (-1, page_size))
