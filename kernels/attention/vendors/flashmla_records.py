"""Token index lists for FlashMLA's sparse kernel, its only kernel that reads FP8 records.

A captured step needs lists of fixed width, the maximum context; each list's length on the device then bounds the work,
which the kernel supports on Blackwell. On Hopper it takes no lengths for these records, and every step would cost as
much as the maximum context.

Legend: T query tokens, R requests, S context tokens of the longest, K listed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_engine.kernels.attention.vendors.in_place import PageBuffer
from moe_engine.kernels.attention.vendors.paging import StepPlan
from moe_engine.kernels.queries import AttentionBatch, PagedQueries

LIST_MULTIPLE = 64
"""The number of listed tokens must be a multiple of this."""

MAX_LISTED = 1 << 24
"""Max list entries in memory (64 MiB); more query tokens run in several calls."""


class Part(NamedTuple):
    """One call: its query tokens, its schedule, indices [T, 1, K] int32, valid entries of each list (None: all)."""

    tokens: slice
    schedule: Any
    indices: Tensor
    lengths: Tensor | None


class Chosen:
    """All tokens visible to each query token, as slots padded with -1, in calls of bounded size."""

    def __init__(self, queries: PagedQueries, new_schedule: Callable[[], Any]) -> None:
        self._queries = queries
        self._longest = max(queries.context_lens)
        self._width = -(-self._longest // LIST_MULTIPLE) * LIST_MULTIPLE
        step = max(1, MAX_LISTED // self._width)
        total = queries.num_tokens
        self._ranges = [slice(start, min(start + step, total)) for start in range(0, total, step)]
        self._schedules = [new_schedule() for _ in self._ranges]
        counts = queries.query_starts.long().diff()
        self._request = torch.repeat_interleave(
            torch.arange(len(counts), device=counts.device), counts, output_size=total
        )
        place = torch.arange(total, device=counts.device) - queries.query_starts.long()[self._request]
        self._before = (queries.context_lens_device.long() - counts)[self._request]  # [T]
        self._seen = self._before + place + 1  # [T]
        self._only = self._indices(self._ranges[0]) if len(self._ranges) == 1 else None

    def parts(self) -> Iterator[Part]:
        """The calls of a layer."""
        for part, schedule in zip(self._ranges, self._schedules):
            yield Part(part, schedule, self._indices(part) if self._only is None else self._only, None)

    def _indices(self, part: slice) -> Tensor:
        queries, request = self._queries, self._request[part]
        slots = queries.slot_table[:, : self._longest].index_select(0, queries.rows[request])
        position = torch.arange(self._longest, device=request.device)
        visible = position < self._seen[part, None]
        if queries.visible is not None:
            bit = position - self._before[part, None]
            drawn = (queries.visible[part, None] >> bit.clamp(0, 63) & 1).bool()
            count = queries.query_starts.diff()[request].long()
            visible = (bit < 0) | (drawn & (bit < count[:, None]))
        indices = slots.new_full((len(request), self._width), -1)
        indices[:, : self._longest] = torch.where(visible, slots, -1)
        return indices.unsqueeze(1)


class ChosenInPlace(StepPlan):
    """`RenewablePlan`: lists of maximum-context width and their lengths, at fixed addresses.

    Args:
        key: cache key of the queries' lists in the adapter.
    """

    on_device = False
    common = False

    def __init__(
        self, batch: AttentionBatch, queries: PagedQueries, buffer: PageBuffer, schedule: Any, key: tuple[Any, ...]
    ) -> None:
        super().__init__(batch)
        self._queries = queries
        device, count = queries.slot_table.device, queries.query_lens[0]
        width = -(-queries.slot_table.shape[1] // LIST_MULTIPLE) * LIST_MULTIPLE
        token = torch.arange(queries.num_tokens, device=device)
        self._request = token // count
        self._unseen = count - 1 - token % count  # context tokens hidden from each query token
        self._lengths = torch.empty(queries.num_tokens, dtype=torch.int32, device=device)
        self._indices = buffer.take(queries.num_tokens * width, queries).view(-1, 1, width)
        self._schedule = schedule
        self.get(queries, key, lambda: self)
        self.renew()

    def parts(self) -> Iterator[Part]:
        """See `Chosen.parts`."""
        yield Part(slice(None), self._schedule, self._indices, self._lengths)

    def renew(self) -> None:
        queries, longest = self._queries, max(self._queries.context_lens)
        self._lengths.copy_(queries.context_lens_device[self._request] - self._unseen)
        rows = queries.rows[self._request]
        self._indices[:, 0, :longest].copy_(queries.slot_table[:, :longest].index_select(0, rows))
