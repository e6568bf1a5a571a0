"""What a rank on a CPU does to rows of tokens before, between and after the messages of a dispatch.

A decode step asks for all of this in every layer with a handful of tokens: the calls are the cost, not the bytes.
Legend: T tokens of this rank, N tokens arrived, K choices a token, S rows a sum, R ranks, E experts of this rank,
M rows of the experts' batch, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Part = tuple[Tensor, int]
"""[T, ...] numbers of each token, contiguous in a row, and the byte of a record where they begin."""


@dataclass(frozen=True)
class Records:
    """A token as a row of bytes, which holds its choices as int32 [top_k] from byte `ids_offset` on."""

    num_bytes: int
    ids_offset: int
    top_k: int


class TokenRows(Protocol):
    """Ids are int32; positions are int64 [.., ..], -1: none. All tensors lie in the host's memory."""

    name: str

    def valid(self, ids: Tensor, num_experts: int) -> bool:
        """Whether ids [T, K], int32 or int64, are all in -1..num_experts-1, and no token names an expert twice."""

    def route(self, ids: Tensor, num_local: int, takes_part: Tensor) -> tuple[Tensor, list[int]]:
        """Who gets which token, once: rank r, if bool takes_part [R] has it, holds experts from r * num_local on.

        Returns:
            positions [T, R], each token's number among all that are sent, by rank, then by token; and how many each
            rank is sent.
        """

    def pack(
        self, parts: Sequence[Part], positions: Tensor, bases: Sequence[int], records: Records, out: Tensor
    ) -> None:
        """Token t's record is written to byte bases[r] + positions[t, r] * num_bytes of uint8 `out`, for every r that
        has a position; what no part covers is left as it is."""

    def take(
        self,
        memory: Tensor,
        begins: Sequence[int],
        counts: Sequence[int],
        records: Records,
        experts: tuple[int, int],
        out: Tensor,
    ) -> list[int]:
        """Copies the records that name an expert here, one after the other, their ids then as `localize` leaves them.

        Args:
            memory: uint8; counts[r] records begin at byte begins[r].
            experts: the first expert here, and how many there are.
            out: uint8 [at least as many as are taken, num_bytes].

        Returns:
            How many were taken of each r.
        """

    def localize(self, ids: Tensor, experts: tuple[int, int]) -> None:
        """In place: ids [N, K] are counted from the first expert here, -1 where it is elsewhere."""

    def group(self, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        """Rows sorted by expert, then by token, then by choice: int32 offsets [E + 1], and the positions [N, K]."""

    def spread(self, data: Tensor, positions: Tensor, out: Tensor) -> None:
        """Row n of data [N, D] is written to the rows of out [M, D] that positions [N, K] name."""

    def sum_rows(self, rows: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sums of rows [M, D] in float32, rounded once to their dtype: [N, D]. Rows that nobody names are not read.

        Args:
            positions: [N, S].
            weights: float32 [N, S]; None: ones.
        """
