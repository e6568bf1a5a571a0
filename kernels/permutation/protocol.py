"""Permute and unpermute: sort (token, choice) pairs by expert, copy rows to their positions, sum them back.

Around messages the same operations serve ranks instead of experts, and on host ranks the byte records of messages.
Legend: T tokens, K choices per token, S positions per token, R ranks, E experts of this rank, M rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moe_engine.kernels.quantization.groups import RowGroups

Part = tuple[Tensor, int]
"""Field of a record: a tensor [T, ...], contiguous per token, and its byte offset in the record."""


@dataclass(frozen=True)
class Records:
    """Layout of a token's byte record, with its choices as int32 [top_k] at byte `ids_offset`."""

    num_bytes: int
    ids_offset: int
    top_k: int


@dataclass(frozen=True)
class ExpertOrder:
    """Pairs sorted by expert, then by token.

    Attributes:
        offsets: int32 [E + 1]; expert e has rows offsets[e]:offsets[e + 1], its padding included.
        ends: int32 [E], end of expert e's valid rows, start of its padding.
        positions: int32 [T, K], the row of each pair; -1 if its id is not one of the E experts.
        source: int32 [M], the pair t * K + k of each row, -1 in padding; without padding between groups, rows from
            offsets[E] on are unspecified.
    """

    offsets: Tensor
    ends: Tensor
    positions: Tensor
    source: Tensor


@dataclass(frozen=True)
class ExpertRows:
    """Results of the routed experts before their sum: the arguments of `Permutation.combine`.

    Attributes:
        rows: [M, D], contiguous.
        positions: int32 [T, K], the row of each pair; -1: none.
        weights: float32 [T, K].
        add: [T, D], added to the sum; None: nothing.
    """

    rows: Tensor
    positions: Tensor
    weights: Tensor
    add: Tensor | None = None


def most_rows(num_pairs: int, num_experts: int, align: int) -> int:
    """M: the number of non-empty groups is at most the number of pairs, and each wastes less than one alignment."""
    worst = num_pairs + min(num_experts, num_pairs) * (align - 1)
    return -(-worst // align) * align


class Permutation(Protocol):
    """Ids are int32, experts counted from 0; other ids have no row. Positions are int32 [T, S], -1: none.

    The first five operations never synchronize, and no shape depends on a value: a captured graph can replay them.
    """

    name: str

    def sort_by_expert(self, ids: Tensor, num_experts: int, align: int = 1, marks_padding: bool = True) -> ExpertOrder:
        """Sorts the pairs of ids [T, K], stably; groups start at multiples of `align`. Without `marks_padding` the
        `source` of padding rows may be unspecified."""

    def group(self, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        """`offsets` and `positions` of `sort_by_expert` without alignment."""

    def place(self, ids: Tensor, num_experts: int, capacity: int) -> tuple[Tensor, Tensor]:
        """`group` with `capacity` rows per expert: int32 counts [E], and positions; pairs beyond have no row."""

    def permute(
        self, x: Tensor, positions: Tensor, out: Tensor, scales: Tensor | None = None, out_scales: Tensor | None = None
    ) -> None:
        """Copies row t of x [T, D] to rows positions[t] of out [M, D], contiguous; other rows become unspecified.

        Args:
            scales, out_scales: of quantized rows: float32 [T, B] and [M, B] (in any strides), copied with them.
        """

    def combine(
        self, rows: Tensor, positions: Tensor, weights: Tensor | None = None, add: Tensor | None = None
    ) -> Tensor:
        """Weighted sums in float32 and in the order of the columns, rounded once to the rows' dtype: [T, D].

        Args:
            rows: [M, D]; rows without a position are never read.
            weights: float32 [T, S], ignored without a position; None: ones.
            add: [T, D], added to the sums.
        """

    def scale_rows(self, rows: Tensor, weights: Tensor, groups: RowGroups) -> Tensor:
        """rows [M, D] *= weights float32 [M], in place, at least for the rows of the groups. Returns rows."""

    def valid(self, ids: Tensor, num_experts: int) -> bool:
        """True if ids [T, K], int32 or int64, are all in -1..num_experts-1, and no token repeats an expert.
        Synchronizes with the device."""

    def route(self, ids: Tensor, num_local: int, takes_part: Tensor) -> tuple[Tensor, Tensor]:
        """Target ranks of each token, deduplicated: rank r, if takes_part[r], holds experts from r * num_local on.

        Returns:
            positions [T, R], each token's index in the send buffer, by rank, then by token; and the number of tokens
            sent to each rank, int64 [R].
        """

    # -- byte records in host memory

    def pack(
        self, parts: Sequence[Part], positions: Tensor, bases: Sequence[int], records: Records, out: Tensor
    ) -> None:
        """Writes token t's record to byte bases[r] + positions[t, r] * num_bytes of uint8 `out`, for every r with a
        position; bytes outside all parts are not written."""

    def take(
        self,
        memory: Tensor,
        begins: Sequence[int],
        counts: Sequence[int],
        records: Records,
        experts: tuple[int, int],
        out: Tensor,
    ) -> list[int]:
        """Compacts the records with a local expert, with ids converted by `localize`.

        Args:
            memory: uint8; counts[r] records begin at byte begins[r].
            experts: the first local expert, and their number.
            out: uint8 [at least the taken records, num_bytes].

        Returns:
            Number of records taken from each r.
        """

    def localize(self, ids: Tensor, experts: tuple[int, int]) -> None:
        """In place: converts ids [N, K] to local expert indices, -1 for experts of other ranks."""
