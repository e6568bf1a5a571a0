"""Symmetric memory layout of dispatch and combine. Imports no torch.

All ranks have the same regions at the same offsets, so a peer's base address is enough to access any region. A token
takes one row of every rank that has some of its experts, at (source rank, token): no rank needs the counts of others
before it writes.
Legend: R ranks, El experts of a rank, M max tokens of a rank, K experts per token, D hidden, S slots (concurrent
results).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

ALIGNMENT = 256  # of every region in bytes: vectors of 16 bytes, and no flag in the cache line of data
FLAG_BYTES = 8  # flags count the uses of a slot and are never reset
SENT, RETURNED = range(2)
"""Kinds of flags: a rank's tokens have arrived, its results for this rank's tokens."""
NUM_KINDS = 2


@dataclass(frozen=True)
class Slot:
    """Offsets in bytes of one slot's regions.

    Attributes:
        flags: int64 [R] of each kind: last epoch of the rank.
        sizes: int32 [R]: tokens of each rank in this epoch.
        ids: int32 [R, M, K]: this rank's experts of each token, from 0; -1: of another rank, or none.
        weights: float32 [R, M, K]: router weights.
        rows: [R, M, D] as dispatched; rows of tokens without an expert here are unspecified.
        scales: float32 [R, M, D / 128] of FP8 rows, else empty.
        returned: [R, M, D]: each rank's weighted sum for this rank's tokens.
        end: end of the slot's regions.
    """

    flags: tuple[int, ...]
    sizes: int
    ids: int
    weights: int
    rows: int
    scales: int
    returned: int
    end: int


@dataclass(frozen=True)
class Regions:
    """Sizes of the regions; `item_bytes`: bytes of an activation element."""

    num_ranks: int
    num_local: int
    max_tokens: int
    top_k: int
    hidden: int
    item_bytes: int
    fp8: bool

    @property
    def capacity(self) -> int:
        """Rows of an expert: every token of every rank."""
        return self.num_ranks * self.max_tokens

    def slot(self, number: int) -> Slot:
        rows = self.capacity
        row_bytes = self.hidden if self.fp8 else self.hidden * self.item_bytes
        sizes = (
            *[self.num_ranks * FLAG_BYTES] * NUM_KINDS,
            self.num_ranks * 4,
            rows * self.top_k * 4,
            rows * self.top_k * 4,
            rows * row_bytes,
            rows * (self.hidden // 128) * 4 if self.fp8 else 0,
            rows * self.hidden * self.item_bytes,
        )
        ends = list(accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
        begins = [number * ends[-1] + end for end in (0, *ends)]
        return Slot(tuple(begins[:NUM_KINDS]), *begins[NUM_KINDS:])

    def num_bytes(self, num_slots: int) -> int:
        """Bytes of `num_slots` slots."""
        return self.slot(num_slots - 1).end
