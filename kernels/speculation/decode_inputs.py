"""Captured decodes without drafts: the inputs of a step, and the tokens that it has sampled.

Legend: R requests of a step; W entries of a row in the slot table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class DecodeBuffers:
    """Memory at fixed addresses that a captured step reads, [R or more] each, contiguous."""

    ids: Tensor  # int64
    positions: Tensor  # int64
    slots: Tensor  # int64
    rows: Tensor  # int32
    lens: Tensor  # int32: context tokens

    def first(self, count: int) -> DecodeBuffers:
        """The buffers of the first requests."""
        return DecodeBuffers(*(x[:count] for x in (self.ids, self.positions, self.slots, self.rows, self.lens)))


class DecodeKernels(Protocol):
    def enter(self, packed: Tensor, rows: Tensor, last_tokens: Tensor, table: Tensor, out: DecodeBuffers) -> None:
        """Writes a step's slots to the slot table [rows, W] int32, and its inputs to the first R of `out`.

        Args:
            packed: [4 R] int64, in memory of its own: positions, slots, places in the flat table; then [R] int32
                context tokens, and slots again.
            rows: [R] int64, in memory of its own. last_tokens: int64, by row.
        """

    def keep(self, tokens: Tensor, rows: Tensor, last_tokens: Tensor) -> None:
        """last_tokens[rows[r]] = tokens[r], 0 for a negative one; int64."""


class TorchDecodes:
    """`DecodeKernels` on any device."""

    def enter(self, packed: Tensor, rows: Tensor, last_tokens: Tensor, table: Tensor, out: DecodeBuffers) -> None:
        positions, slots, flat, ints = packed.split(len(rows))
        lens, slots32 = ints.view(torch.int32).split(len(rows))
        table.view(-1).index_copy_(0, flat, slots32)
        ids, own = last_tokens.index_select(0, rows), out.first(len(rows))
        torch._foreach_copy_([own.ids, own.positions, own.slots], [ids, positions, slots])  # a launch for each dtype
        torch._foreach_copy_([own.rows, own.lens], [rows.int(), lens])

    def keep(self, tokens: Tensor, rows: Tensor, last_tokens: Tensor) -> None:
        last_tokens.index_copy_(0, rows, tokens.clamp_min(0))
