"""The lists of tokens that FlashMLA's sparse kernel attends to: it is the only one that reads FP8 records.

Legend: T query tokens, R requests, S context tokens of the longest, K listed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import PagedQueries

LIST_MULTIPLE = 64
"""What the number of listed tokens must divide by."""

MAX_LISTED = 1 << 24
"""Entries of a list held at once (64 MiB); more query tokens go in several calls."""


class Chosen:
    """Of each query token all that it sees, as slots padded with -1, in parts of bounded size."""

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

    def parts(self) -> Iterator[tuple[slice, Any, Tensor]]:
        """(query tokens, the schedule of their call, indices [T, 1, K] int32)."""
        for part, schedule in zip(self._ranges, self._schedules):
            yield part, schedule, self._indices(part) if self._only is None else self._only

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
