"""Counts of the last passes, [S, ...] int32: a ring of fixed length, or a buffer that doubles; and their total."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

FIRST_LENGTH = 128


class PassBuffer:
    """One row a pass.

    Args:
        length: passes kept, the oldest overwritten; -1 keeps all and doubles the memory from 128 passes on.
        shape: of a row.
    """

    def __init__(self, length: int, shape: tuple[int, ...], device: torch.device) -> None:
        self._grows = length == -1
        self._rows = torch.zeros(FIRST_LENGTH if self._grows else length, *shape, dtype=torch.int32, device=device)
        self._views = self._rows.unbind(0)
        self._next = 0
        self._pass_ids: deque[int] = deque(maxlen=None if self._grows else length)
        self._total = torch.zeros(shape, dtype=torch.int64, device=device)
        self._num_totalled = 0  # passes that are in the total

    def next_row(self, pass_id: int) -> Tensor:
        """The row of a new pass, to be filled; it holds what it held before."""
        length = len(self._views)
        if self._next and self._next % length == 0:
            self.total()
            if self._grows:
                self._rows = torch.cat([self._rows, torch.zeros_like(self._rows)])
                self._views = self._rows.unbind(0)
                length *= 2
        row = self._views[self._next % length]
        self._next += 1
        self._pass_ids.append(pass_id)
        return row

    @property
    def pass_ids(self) -> list[int]:
        """Of the passes kept, oldest first."""
        return list(self._pass_ids)

    def rows(self) -> Tensor:
        """Those of `pass_ids`, in that order; a copy."""
        length = self._rows.shape[0]
        if self._next <= length:
            return self._rows[: self._next].clone()
        return self._rows.roll(-(self._next % length), dims=0)

    def total(self) -> Tensor:
        """int64, over all passes since `clear_total`, those overwritten and those before `reset` included.

        Summed up when asked for and when the ring is about to begin anew, so that a pass pays nothing.
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
        self._rows = self._rows[:FIRST_LENGTH].clone() if self._grows else self._rows
        self._rows.zero_()
        self._views = self._rows.unbind(0)
        self._pass_ids.clear()
        self._next = self._num_totalled = 0
