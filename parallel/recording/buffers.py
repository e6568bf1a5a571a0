"""Counts of the last passes, [S, ...] int32: a ring of fixed length, or a buffer that doubles; and their total."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

FIRST_LENGTH = 128


class PassBuffer:
    """One row per pass.

    Args:
        length: passes kept, the oldest overwritten; -1 keeps all and doubles the memory from 128 passes on.
        shape: shape of a row.
    """

    def __init__(self, length: int, shape: tuple[int, ...], device: torch.device) -> None:
        self._grows = length == -1
        # one row more than passes: a running pass, which may be dropped, does not overwrite a stored row
        self._rows = torch.zeros(FIRST_LENGTH if self._grows else length + 1, *shape, dtype=torch.int32, device=device)
        self._update_next()
        self._next = 0
        self._pass_ids: deque[int] = deque(maxlen=None if self._grows else length)
        self._total = torch.zeros(shape, dtype=torch.int64, device=device)
        self._num_totalled = 0  # passes included in the total

    def _update_next(self) -> None:
        self._views = self._rows.unbind(0)
        self._addresses = [row.data_ptr() for row in self._views]
        self._length = len(self._views)
        self.row_bytes = self._views[0].nbytes

    def next_row(self) -> Tensor:
        """The row of a new pass, uninitialized; to be filled before `keep`."""
        place = self._next_place()
        return self._views[place]

    def next_address(self) -> int:
        """Address of `next_row`."""
        place = self._next % self._length or self._next_place()
        return self._addresses[place]

    def keep(self, pass_id: int) -> None:
        """Stores the filled row."""
        self._next += 1
        self._pass_ids.append(pass_id)

    def _next_place(self) -> int:
        """Index of the next row; may grow the buffer."""
        place = self._next % len(self._views)
        if place or not self._next:
            return place
        self.total()
        if self._grows:
            place = len(self._views)
            self._rows = torch.cat([self._rows, torch.zeros_like(self._rows)])
            self._update_next()
        return place

    @property
    def pass_ids(self) -> list[int]:
        """Ids of the stored passes, oldest first."""
        return list(self._pass_ids)

    def rows(self) -> Tensor:
        """The rows of `pass_ids`, in that order; a copy."""
        places = torch.arange(self._next - len(self._pass_ids), self._next, device=self._rows.device)
        return self._rows[places % len(self._views)]

    def total(self) -> Tensor:
        """int64, over all passes since `clear_total`, overwritten passes and passes before `reset` included.

        Summed on request and before the ring wraps around, so that a pass has no extra cost.
        """
        begin = self._num_totalled % self._rows.shape[0]
        self._total += self._rows[begin : begin + self._next - self._num_totalled].sum(dim=0)
        self._num_totalled = self._next
        return self._total

    def clear_total(self) -> None:
        self._total.zero_()
        self._num_totalled = self._next

    def reset(self) -> None:
        self.total()
        if self._grows:
            self._rows = self._rows[:FIRST_LENGTH].clone()
            self._update_next()
        self._pass_ids.clear()
        self._next = self._num_totalled = 0
