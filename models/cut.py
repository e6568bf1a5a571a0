"""A requested slice of a stored matrix: of its rows, its columns, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moe_engine.kernels.quantization.protocol import BLOCK, num_blocks


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
        cuts = (self.rows, self.cols)[: len(whole)]
        return [n if cut is None else len(range(*cut.indices(n))) for n, cut in zip(whole, cuts)]

    def keeps_blocks_whole(self, whole: Sequence[int]) -> bool:
        """True if no 128 x 128 block is split; blocks at the edges may be smaller."""
        return all(map(_between_blocks, (self.rows, self.cols), whole))

    def in_blocks(self) -> Cut:
        """The matching slice of the scale grid, for a slice of whole blocks."""
        return Cut(_in_blocks(self.rows), _in_blocks(self.cols))


UNCUT = Cut()


def _between_blocks(cut: slice | None, length: int) -> bool:
    if cut is None:
        return True
    start, stop, _ = cut.indices(length)
    return start % BLOCK == 0 and (stop % BLOCK == 0 or stop == length)


def _in_blocks(cut: slice | None) -> slice | None:
    if cut is None:
        return None
    return slice((cut.start or 0) // BLOCK, None if cut.stop is None else num_blocks(cut.stop))
