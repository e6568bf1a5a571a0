"""Plans of vendor adapters for captured launches (`plan_in_place`): the library's inputs stay at fixed addresses.

A captured graph reads page numbers at the addresses it was captured with; `renew` writes the next step's values there,
in stream order. One graph runs at a time, so all graphs of a backend share the same memory.

Legend: R requests, W pages of the longest possible context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.attention.vendors.paging import TABLE, Paged, StepPlan
from moe_engine.kernels.queries import AttentionBatch, PagedQueries


class PageBuffer:
    """int32 memory for the page numbers of the next graph, for each window: layers with different windows are in the
    same graph, and may have different slot tables. The largest graph is captured first; a graph that needs more
    allocates again, and earlier graphs keep their memory."""

    def __init__(self) -> None:
        self._buffers: dict[int | None, Tensor] = {}

    def take(self, count: int, queries: PagedQueries) -> Tensor:
        """[count] on the queries' device, the start of their window's memory; initially 0."""
        known, device = self._buffers.get(queries.window), queries.slot_table.device
        if known is None or len(known) < count or known.device != device:
            known = self._buffers[queries.window] = torch.zeros(count, dtype=torch.int32, device=device)
        return known[:count]


def widest(queries: PagedQueries, page_size: int) -> int:
    """W: pages of a context of the slot table's maximum length."""
    return -(-queries.slot_table.shape[1] // page_size)


class TableInPlace(StepPlan):
    """`RenewablePlan` for libraries that read lengths and a page table on the device and partition work there.

    Lengths are the queries' own tensors. The table has maximum-context width; entries after a context are not read.
    Anything else built at the first layer is built during capture, and so at every replay.
    """

    on_device = True
    common = True

    def __init__(
        self, batch: AttentionBatch, queries: PagedQueries, buffer: PageBuffer, page_size: int | None = None
    ) -> None:
        super().__init__(batch)
        self._queries, self._page_size = queries, page_size or queries.page_size
        shape = queries.num_requests, widest(queries, self._page_size)
        self._table = buffer.take(shape[0] * shape[1], queries).view(shape)
        self.get(queries, TABLE, lambda: self._table)
        self.renew()

    def renew(self) -> None:
        Paged.of(self._queries, self._page_size).write_table(self._table)
