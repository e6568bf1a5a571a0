"""Integer codes of a slice of a matrix, and their values: (code - zero) * scale, a scale for each group of columns.

Legend: N rows and K columns of the slice, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Codes:
    """A slice of a matrix as stored.

    Attributes:
        values: uint8 [N, K], 0 to 2^bits - 1.
        scales: floats [N, G], of all groups of the matrix.
        zeros: uint8 [N, G]; None: `middle` everywhere.
        middle: the code of 0 without zero points.
        groups: int64 [K]: the group of each column.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    middle: int
    groups: Tensor

    def dequantize_into(self, out: Tensor) -> None:
        """out [N, K] = values, in float32 and then rounded to out's dtype; some rows at a time."""
        num_rows, num_cols = self.values.shape
        step = max(1, CHUNK_ELEMENTS // max(1, num_cols))
        one = self.scales.shape[1] == 1
        for start in range(0, num_rows, step):
            rows = slice(start, min(start + step, num_rows))
            part = self.values[rows].float()
            zeros = self.middle if self.zeros is None else self._of_columns(self.zeros[rows].float(), one)
            out[rows].copy_(part.sub_(zeros).mul_(self._of_columns(self.scales[rows].float(), one)))

    def _of_columns(self, of_groups: Tensor, one: bool) -> Tensor:
        return of_groups if one else of_groups.index_select(1, self.groups)


def groups_of(columns: slice | None, k: int, group: int) -> Tensor:
    """int64 [K]: the group of each column of a slice of a matrix with `k` columns; group 0: one group of all."""
    first, last, _ = (columns or slice(None)).indices(k)
    columns_of = torch.arange(first, last)
    return torch.zeros_like(columns_of) if group == 0 else columns_of // group


def nibbles(packed: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 [R, C] -> uint8 [R, C * 32 / bits]: lowest bits first, or value j at position order[j]."""
    per = 32 // bits
    raw = packed.flatten().view(torch.uint8).view(packed.shape[0], packed.shape[1], 4)  # one column may have any stride
    if bits == 8:
        values = raw
    else:
        values = torch.stack((raw & 15, raw >> 4), dim=-1).view(packed.shape[0], packed.shape[1], per)
    if order is not None:
        values = values[..., list(order)]
    return values.reshape(packed.shape[0], packed.shape[1] * per)


def cover(cut: slice | None, length: int, per: int) -> tuple[slice | None, slice]:
    """The packed entries that hold a slice of `length` values, `per` in an entry; and the slice within their values."""
    if cut is None:
        return None, slice(0, length)
    start, stop, _ = cut.indices(length)
    first = start // per
    return slice(first, -(-stop // per)), slice(start - first * per, stop - first * per)
