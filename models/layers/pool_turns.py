"""Rotations of the keys of pools (Qwen3.8-Flash-Next): that of a pool's first token, which may be an image token, and
in an earlier step. Computed once per step.

Legend: T tokens, R rotary width, P tokens of a pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.layers.axis_rows import AxisRows


@dataclass(frozen=True, slots=True)
class PoolTurns:
    """`rows` of `table` rotate the keys of the pools that tokens complete; other tokens have any row."""

    places: Tensor  # [T] int64: of the tokens in their sequences
    rows: Tensor  # [T] int64
    table: RotaryTable

    @classmethod
    def of(cls, batch: ForwardBatch, table: RotaryTable, size: int, axes: AxisRows | None) -> PoolTurns:
        """
        Args:
            table: of positions. size: P.
            axes: of image tokens, if their positions have several axes.

        Raises:
            ValueError: a batch with images has no `pool_starts`.
        """
        starts = batch.pool_starts
        if starts is None or axes is None:
            if batch.images is not None:
                raise ValueError("a batch with image tokens needs pool_starts")
            return cls(batch.positions, (batch.positions + (1 - size)).clamp_(min=0), table)
        rows, every = axes.rows(starts.axes.T), torch.arange(batch.num_tokens, device=starts.axes.device)
        return cls(starts.places, every, RotaryTable(rows, table.interleaved))
