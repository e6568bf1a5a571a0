"""Permute and unpermute of token rows on a CPU rank: routing, packing, sorting and summing around dispatch messages.

A decode step calls all of this in every layer with few tokens: the number of calls dominates, not the bytes.
Legend: T tokens of this rank, N received tokens, K choices per token, S rows per sum, R ranks, E experts of this rank,
M rows of the experts' batch, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Part = tuple[Tensor, int]
"""Field of a record: a tensor [T, ...], contiguous per token, and its byte offset in the record."""


@dataclass(frozen=True)
class Records:
    """Layout of a token's byte record, with its choices as int32 [top_k] at byte `ids_offset`."""

    num_bytes: int
    ids_offset: int
    top_k: int


class TokenRows(Protocol):
    """Ids are int32; positions are int64 [.., ..], -1: none. All tensors are in host memory."""

    name: str

    def valid(self, ids: Tensor, num_experts: int) -> bool:
        """True if ids [T, K], int32 or int64, are all in -1..num_experts-1, and no token repeats an expert."""

    def route(self, ids: Tensor, num_local: int, takes_part: Tensor) -> tuple[Tensor, list[int]]:
        """Target ranks of each token, deduplicated: rank r, if takes_part[r], holds experts from r * num_local on.

        Returns:
                positions [T, R], each token's index in the send buffer, by rank, then by token; and the number of
                tokens sent to each rank.
        """

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

    def group(self, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        """Rows sorted by expert, then by token, then by choice: int32 offsets [E + 1], and the positions [N, K]."""

    def spread(self, data: Tensor, positions: Tensor, out: Tensor) -> None:
        """Writes row n of data [N, D] to rows positions[n] of out [M, D]; positions [N, K]."""

    def sum_rows(self, rows: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sums of rows [M, D] in float32, rounded once to their dtype: [N, D]. Rows without a position are not read.

        Args:
            positions: [N, S].
            weights: float32 [N, S]; None: ones.
        """
