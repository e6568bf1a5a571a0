"""The transfer threads' interface to the worker's copies (`worker.kv_cache.transfer_copies`), and parts of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class StagedRows(Protocol):
    """Places of the host tier; a row is the KV of a token in all layers of this rank."""

    stored: int
    """Number of the last complete store."""

    @property
    def row_bytes(self) -> int: ...

    @property
    def num_tensors(self) -> int:
        """Number of tensors of the KV pool in a row; tensors with heads have equal sizes."""

    def read(self, places: list[int]) -> np.ndarray:
        """[n, row_bytes], new memory."""

    def read_into(self, places: list[int], out: np.ndarray) -> None:
        """Copies rows to out [n, row_bytes], contiguous."""

    def write(self, places: list[int], rows: np.ndarray) -> None:
        """The inverse of `read`."""


@dataclass(frozen=True)
class RowPart:
    """The part of a rank's rows that another rank also holds: heads [begin, end) of `num_heads` in each tensor; the
    whole row if `num_heads` is 0."""

    begin: int = 0
    end: int = 0
    num_heads: int = 0

    def bytes_of(self, rows: StagedRows) -> int:
        """Bytes of a token."""
        return rows.row_bytes * (self.end - self.begin) // self.num_heads if self.num_heads else rows.row_bytes

    def read_into(self, rows: StagedRows, places: list[int], out: np.ndarray) -> None:
        """Copies the part of these places to out, uint8 [n * bytes of the part]."""
        if self._is_whole:
            rows.read_into(places, out.reshape(len(places), -1))
            return
        found = self._cut(rows, rows.read(places))
        out.reshape(found.shape)[:] = found

    def write(self, rows: StagedRows, places: list[int], values: np.ndarray) -> None:
        """The inverse of `read_into`; the rest of the rows is unchanged."""
        if self._is_whole:
            rows.write(places, values.reshape(len(places), -1))
            return
        whole = rows.read(places)
        target = self._cut(rows, whole)
        target[:] = values.reshape(target.shape)
        rows.write(places, whole)

    @property
    def _is_whole(self) -> bool:
        return self.end - self.begin == self.num_heads

    def _cut(self, rows: StagedRows, whole: np.ndarray) -> np.ndarray:
        """A view of rows [n, row_bytes]: [n, tensors, heads, bytes of a head]."""
        return whole.reshape(len(whole), rows.num_tensors, self.num_heads, -1)[:, :, self.begin : self.end]
