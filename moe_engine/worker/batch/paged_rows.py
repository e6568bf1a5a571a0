"""Request rows as a batch addresses them: KV slots in pages, window slots and LoRA adapters of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.lora.protocol import AdapterTokens
from moe_engine.kernels.queries import PagedQueries, SharedRun
from moe_engine.models.batch import PoolStarts, WindowSlots
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.batch.window_table import WindowTable


@dataclass(frozen=True)
class PagedRows:
    """
    Args:
        window: sliding window of the model's first cache group.
        windows: the table of windowed layers, if their KV is bounded.
    """

    rows: RequestRows
    page_size: int
    window: int | None = None
    windows: WindowTable | None = None

    def queries(
        self,
        query_lens: list[int],
        context_lens: list[int],
        rows: Tensor,
        query_starts: Tensor,
        context_lens_device: Tensor,
        visible: Tensor | None = None,
        shared: Sequence[SharedRun] = (),
    ) -> PagedQueries:
        """Queries of the first cache group."""
        table = self.rows.slot_table if self.window is None or self.windows is None else self.windows.table
        return PagedQueries(
            query_lens, context_lens, rows, query_starts, context_lens_device, table, self.page_size, visible, shared,
            self.window,
        )  # fmt: skip

    def window_slots(self, flat: Tensor) -> WindowSlots | None:
        """flat [T] int64: indices into the flat slot table."""
        return None if self.windows is None else self.windows.of(flat)

    def pool_starts(
        self, rows: np.ndarray, places: np.ndarray, upload: Callable[[Tensor], Tensor]
    ) -> PoolStarts | None:
        """rows and places [T] int64 of the tokens; None: no pool needs the position of its first token."""
        images = self.rows.images
        if images is None or images.pool == 1:
            return None
        both = np.concatenate((places, images.pool_starts(rows, places).ravel()))
        own, axes = upload(torch.from_numpy(both)).split((len(places), 3 * len(places)))
        return PoolStarts(own, axes.view(-1, 3))

    def adapters(self, rows: np.ndarray) -> AdapterTokens | None:
        """rows [T] int64: the row of each token."""
        return None if self.rows.adapters is None else self.rows.adapters.of(rows)
