"""Parts of the rows of a rank's host tier that other ranks also hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from moe_engine.worker.kv_cache.transfer_copies import TransferCopies


@dataclass(frozen=True)
class RowPart:
    """The part of a rank's rows that another rank also holds: heads [begin, end) of `num_heads` in each tensor
    (parts of heads, if other layers have more heads), and all of `TransferCopies.undivided`; the whole row if
    `num_heads` is 0."""

    begin: int = 0
    end: int = 0
    num_heads: int = 0

    def bytes_of(self, rows: TransferCopies) -> int:
        """Bytes of a token."""
        return rows.row_bytes if self._is_whole else sum(own.stop - own.start for own, _ in self._spans(rows))

    def read_into(self, rows: TransferCopies, places: list[int], out: np.ndarray) -> None:
        """Copies the part of these places to out, uint8 [n * bytes of the part]."""
        if self._is_whole:
            rows.read_into(places, out.reshape(len(places), -1))
            return
        whole, target = rows.read(places), out.reshape(len(places), -1)
        for own, part in self._spans(rows):
            target[:, part] = whole[:, own]

    def write(self, rows: TransferCopies, places: list[int], values: np.ndarray) -> None:
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

    def _spans(self, rows: TransferCopies) -> Iterator[tuple[slice, slice]]:
        """For each tensor: the bytes of a row that are the part, and their place among those of all tensors."""
        first = at = 0
        for number, width in enumerate(rows.row_widths):
            heads = (0, self.num_heads) if number in rows.undivided else (self.begin, self.end)
            begin, end = (first + width * head // self.num_heads for head in heads)
            yield slice(begin, end), slice(at, at + end - begin)
            first, at = first + width, at + end - begin
