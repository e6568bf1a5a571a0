"""Symmetric memory layout of dispatch and combine. Imports no torch.

All ranks have the same regions at the same offsets, so a peer's base address is enough to access any region.
Legend: R ranks, E experts over all ranks, El experts of a rank, C rows per expert, M max tokens of a rank,
K experts per token, D hidden, S slots (concurrent results).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

ALIGNMENT = 256  # of every region in bytes: vectors of 16 bytes, and no flag in the cache line of data
FLAG_BYTES = 8  # flags count the uses of a slot and are never reset
COUNTED, SENT, RETURNED = range(3)
"""Kinds of flags: a rank's counts have arrived, its rows, its results for this rank's tokens."""
NUM_KINDS = 3


@dataclass(frozen=True)
class Slot:
    """Offsets in bytes of one slot's regions.

    Attributes:
        flags: int64 [R] of each kind: last epoch of the rank.
        counts: int32 [R, E]: rows sent by each rank to each expert.
        origins: int32 [El, C]: origin of a row, rank * M * K + token * K + choice.
        rows: [El, C, D] as dispatched. scales: float32 [El, C, D / 128] of FP8 rows, else empty.
        returned: [M * K, D] expert results for this rank's tokens.
        end: end of the slot's regions.
    """

    flags: tuple[int, ...]
    counts: int
    origins: int
    rows: int
    scales: int
    returned: int
    end: int


@dataclass(frozen=True)
class Regions:
    """Sizes of the regions; `item_bytes`: bytes of an activation element."""

    num_ranks: int
    num_local: int
    max_pairs: int
    capacity: int
    hidden: int
    item_bytes: int
    fp8: bool

    def slot(self, number: int) -> Slot:
        row_bytes = self.hidden if self.fp8 else self.hidden * self.item_bytes
        num_rows = self.num_local * self.capacity
        sizes = (
            *[self.num_ranks * FLAG_BYTES] * NUM_KINDS,
            self.num_ranks * self.num_ranks * self.num_local * 4,
            num_rows * 4,
            num_rows * row_bytes,
            num_rows * (self.hidden // 128) * 4 if self.fp8 else 0,
            self.max_pairs * self.hidden * self.item_bytes,
        )
        ends = list(accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
        begins = [number * ends[-1] + end for end in (0, *ends)]
        return Slot(tuple(begins[:NUM_KINDS]), *begins[NUM_KINDS:])

    def num_bytes(self, num_slots: int) -> int:
        """Bytes of `num_slots` slots."""
        return self.slot(num_slots - 1).end
