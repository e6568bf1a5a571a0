"""Buffers allocated once and reused by every call: fresh pages cost the CPU more than the copy into them."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.parallel.dispatch.payload import RecordFormat
from moe_engine.parallel.dispatch.protocol import NUM_LIVE, Tokens

MAX_VIEWS = 64
"""Record counts with cached views: creating views takes longer than filling a few records."""


class RowBuffer:
    """A grow-only buffer of rows of one width. A result is valid until the next `take`."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rows = torch.empty(0, width, dtype=dtype, device=device)

    def take(self, count: int) -> Tensor:
        """Uninitialized [count, width]."""
        if count > len(self._rows):
            self._rows = self._rows.new_empty(count, self._rows.shape[1])
        return self._rows[:count]


class RecordBuffer:
    """A `RowBuffer` of records, as bytes and as views of their tokens."""

    def __init__(self, form: RecordFormat, device: torch.device) -> None:
        self._format = form
        self._bytes = RowBuffer(form.num_bytes, torch.uint8, device)
        self._most = 0
        self._known: dict[int, tuple[Tensor, Tokens]] = {}

    def take(self, count: int) -> tuple[Tensor, Tokens]:
        """Uninitialized uint8 [count, bytes of a record], and views of its parts."""
        known = self._known.get(count)
        if known is None:
            if count > self._most or len(self._known) == MAX_VIEWS:
                self._known.clear()  # views of a smaller buffer
            self._most = max(count, self._most)
            records = self._bytes.take(count)
            known = self._known[count] = records, self._format.view(records)
        return known


class Slots:
    """Allocates slots to pending results: the lowest free slot, so that a start without pending results is always the
    same. Ranks that replay graphs captured at different times then use the same slots."""

    def __init__(self) -> None:
        self._free = list(range(NUM_LIVE))

    def take(self) -> int:
        if not self._free:
            raise RuntimeError(f"{NUM_LIVE} dispatched batches are pending; combine one before the next dispatch")
        return self._free.pop(0)

    def release(self, slot: int) -> None:
        if slot in self._free:
            raise RuntimeError("this handle was already combined; a handle can be used once")
        self._free = sorted((*self._free, slot))
