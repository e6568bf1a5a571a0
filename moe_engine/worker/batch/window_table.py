"""The block table of layers whose KV is bounded by their attention window: slots in the window pool.

The scheduler maps pages of KV slots to pages of the window pool (`StepPlan.window_pages`). Slots without a window page
have an old entry or 0: they belong to positions before the window, which no attention reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_engine.models.batch import WindowSlots
from moe_engine.worker.device_int_table import DeviceIntTable
from moe_engine.worker.device_stream import DeviceStream


class WindowTable:
    """The window slot of each position of each row, in addition to `RequestRows.slot_table`.

    Args:
        num_slots: tokens of the full KV pool.
    """

    def __init__(self, max_rows: int, width: int, num_slots: int, page_size: int, stream: DeviceStream) -> None:
        self.table: Tensor = stream.lazy_zeros((max_rows, width), torch.int32)  # [max_rows, width]
        self._page_size = page_size
        self._stream = stream
        self._slots = DeviceIntTable(self.table, stream)
        pages = stream.lazy_zeros((num_slots // page_size + 1,), torch.int32)  # the dummy page 0 is mapped to itself
        self._window_page_of = DeviceIntTable(pages, stream)

    def map_pages(self, pairs: Sequence[int]) -> None:
        """Applies new mappings: first slot of a page, first slot of its window page, ..."""
        values = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        pages, window_pages = np.ascontiguousarray(values.T)
        self._window_page_of.put_from_host(pages // self._page_size, window_pages)

    def point(self, row: int, start: int, slots: Tensor) -> None:
        """Sets the slots of a row's positions from `start` on; slots [n] int32 of the full pool."""
        self.table[row, start : start + len(slots)].copy_(self._mapped(slots))

    def write(self, flat: Tensor, slots: Tensor) -> None:
        """As `RequestRows.write_slots`, with slots [T] int32 of the full pool."""
        self._slots.put(flat, self._mapped(slots))

    def write_from_host(self, flat: np.ndarray, slots: np.ndarray) -> None:
        """`write` of arrays."""
        self.write(*(self._stream.from_array(array) for array in (flat, slots)))

    def of(self, flat: Tensor) -> WindowSlots:
        """The window slots of a step's tokens, by their indices flat [T] int64 into the table."""
        return WindowSlots(self._slots.take(flat), self.table)

    def _mapped(self, slots: Tensor) -> Tensor:
        """Slots of the full pool -> slots of the window pool, [n] int32 as in the table."""
        page, pages = self._page_size, self._window_page_of
        if page == 1:
            return pages.take(slots, torch.int32)
        return pages.take(slots // page, torch.int32) + (slots % page).to(torch.int32)
