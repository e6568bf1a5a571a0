"""A requested slice of a stored matrix: of its rows, its columns, or both. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """Slices of the first and of the second dimension; None: all of it."""

    rows: slice | None = None
    cols: slice | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """The slice as a view."""
        if self.rows is not None:
            tensor = tensor[self.rows]
        return tensor if self.cols is None else tensor[:, self.cols]

    def shape(self, whole: Sequence[int]) -> list[int]:
        """The shape of the slice of a tensor of shape `whole`."""
        cuts = (self.rows, self.cols, *(None for _ in whole[2:]))
        return [n if cut is None else len(range(*cut.indices(n))) for n, cut in zip(whole, cuts)]

    def keeps_whole(self, whole: Sequence[int], block: tuple[int, int]) -> bool:
        """True if no block of that many rows and columns is split; blocks at the edges may be smaller."""
        return all(map(_between_blocks, (self.rows, self.cols), whole, block))

    def in_blocks(self, block: tuple[int, int]) -> Cut:
        """The matching slice of the grid of blocks, for a slice of whole blocks."""
        return Cut(_in_blocks(self.rows, block[0]), _in_blocks(self.cols, block[1]))


UNCUT = Cut()


def _between_blocks(cut: slice | None, length: int, block: int) -> bool:
    if cut is None:
        return True
    start, stop, _ = cut.indices(length)
    return start % block == 0 and (stop % block == 0 or stop == length)


def _in_blocks(cut: slice | None, block: int) -> slice | None:
    if cut is None:
        return None
    return slice((cut.start or 0) // block, None if cut.stop is None else -(-cut.stop // block))
