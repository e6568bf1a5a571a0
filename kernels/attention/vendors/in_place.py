"""Plans of vendor adapters for recorded launches (`Replayable`): what a library reads lies in memory that stays.

A recording reads page numbers at the addresses that it was made with; `renew` writes the next step's there, in stream
order. One recording runs at a time, so all of a backend share the same room.

Legend: R requests, W pages of the longest context there may be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import AttentionBatch, PagedQueries
from moe_engine.kernels.attention.vendors.paging import TABLE, Paged, StepPlan


class Room:
    """int32 memory for the page numbers of whichever recording runs next. The largest recording is made first; one that
    needs more gets room of its own, and those before keep theirs."""

    def __init__(self) -> None:
        self._room: Tensor | None = None

    def take(self, count: int, device: torch.device) -> Tensor:
        """[count], the first of the room; 0 where nothing was written."""
        if self._room is None or len(self._room) < count or self._room.device != device:
            self._room = torch.zeros(count, dtype=torch.int32, device=device)
        return self._room[:count]


def widest(queries: PagedQueries, page_size: int) -> int:
    """W: pages of a context as long as the slot table allows."""
    return -(-queries.slot_table.shape[1] // page_size)


class TableInPlace(StepPlan):
    """`RenewablePlan` for libraries that read lengths and a page table on the device and share out work there.

    Lengths are the queries' own tensors. The table is as wide as any context; what lies right of a context is not read.
    Whatever else an adapter makes at the first layer is made while that layer is recorded, and so at every replay.
    """

    def __init__(self, batch: AttentionBatch, queries: PagedQueries, room: Room, page_size: int | None = None) -> None:
        super().__init__(batch)
        self._queries, self._page_size = queries, page_size or queries.page_size
        shape = queries.num_requests, widest(queries, self._page_size)
        self._table = room.take(shape[0] * shape[1], queries.slot_table.device).view(shape)
        self.get(queries, TABLE, lambda: self._table)
        self.renew()

    def renew(self) -> None:
        pages = Paged.of(self._queries, self._page_size).table
        self._table[:, : pages.shape[1]].copy_(pages)
