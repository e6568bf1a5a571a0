"""The transfer threads' interface to the worker's copies (`worker.kv_cache.transfer_copies`), and parts of rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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
    def row_widths(self) -> Sequence[int]:
        """Bytes of a row in each tensor of the KV pool, one after the other."""

    @property
    def undivided(self) -> Collection[int]:
        """Numbers of the tensors that every rank has whole."""

    def read(self, places: list[int]) -> np.ndarray:
        """[n, row_bytes], new memory."""

    def read_into(self, places: list[int], out: np.ndarray) -> None:
        """Copies rows to out [n, row_bytes], contiguous."""

    def write(self, places: list[int], rows: np.ndarray) -> None:
        """The inverse of `read`."""


@dataclass(frozen=True)
class RowPart:
    """The part of a rank's rows that another rank also holds: heads [begin, end) of `num_heads` in each tensor
    (parts of heads, if other layers have more heads), and all of `StagedRows.undivided`; the whole row if `num_heads`
    is 0."""

    begin: int = 0
    end: int = 0
    num_heads: int = 0

    def bytes_of(self, rows: StagedRows) -> int:
        """Bytes of a token."""
        return rows.row_bytes if self._is_whole else sum(own.stop - own.start for own, _ in self._spans(rows))

    def read_into(self, rows: StagedRows, places: list[int], out: np.ndarray) -> None:
        """Copies the part of these places to out, uint8 [n * bytes of the part]."""
        if self._is_whole:
            rows.read_into(places, out.reshape(len(places), -1))
            return
        whole, target = rows.read(places), out.reshape(len(places), -1)
        for own, part in self._spans(rows):
            target[:, part] = whole[:, own]

    def write(self, rows: StagedRows, places: list[int], values: np.ndarray) -> None:
        """The inverse of `read_into`; the rest of the rows is unchanged."""
        if self._is_whole:
            rows.write(places, values.reshape(len(places), -1))
            return
        whole, source = rows.read(places), values.reshape(len(places), -1)
        for own, part in self._spans(rows):
            whole[:, own] = source[:, part]
        rows.write(places, whole)

    @property
    def _is_whole(self) -> bool:
        return self.end - self.begin == self.num_heads

    def _spans(self, rows: StagedRows) -> Iterator[tuple[slice, slice]]:
        """For each tensor: the bytes of a row that are the part, and their place among those of all tensors."""
        first = at = 0
        for number, width in enumerate(rows.row_widths):
            heads = (0, self.num_heads) if number in rows.undivided else (self.begin, self.end)
            begin, end = (first + width * head // self.num_heads for head in heads)
            yield slice(begin, end), slice(at, at + end - begin)
            first, at = first + width, at + end - begin
