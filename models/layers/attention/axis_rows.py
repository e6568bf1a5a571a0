"""Rotary rows of image tokens, whose positions have several axes.

Legend: n image tokens of a step, R rotary width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.batch import ForwardBatch


class AxisRows:
    """The rows of a rotary table from `first` on: a step writes those of its image tokens, so that kernels read one
    table.

    Args:
        axes: `RopeConfig.axes`.
    """

    def __init__(self, table: RotaryTable, first: int, axes: Sequence[int]) -> None:
        self._table, self._first = table, first
        self._axis_of = torch.tensor([*axes, *axes], device=table.cos_sin.device)  # [R]: of cosines, then of sines

    def rows(self, axes: Tensor) -> Tensor:
        """Rows [n, R] of positions by axis [3, n] int64; no host read."""
        axis_of = self._axis_of
        rows = self._table.cos_sin[axes[axis_of].T, torch.arange(len(axis_of), device=axis_of.device)]
        return rows.contiguous()  # indexing keeps the order of the transposed numbers

    def place(self, batch: ForwardBatch) -> ForwardBatch:
        """Writes the rows of the step's image tokens, and points their positions at them."""
        images, axis_of, table = batch.images, self._axis_of, self._table.cos_sin
        if images is None:
            return batch
        first = self._first + images.before
        last = first + len(images.tokens)
        if last > len(table):
            total, room = images.before + len(images.tokens), len(table) - self._first
            raise ValueError(f"{total} image tokens in a step, room for {room}")
        table[first:last] = self.rows(images.axes)
        places = torch.arange(first, last, device=axis_of.device)
        return replace(batch, positions=batch.positions.index_copy(0, images.tokens, places))
