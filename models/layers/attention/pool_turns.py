"""Rotations of the keys of pools (Qwen3.8-Flash-Next): that of a pool's first token, which may be an image token, and
in an earlier step. Computed once per step.

Legend: T tokens, R rotary width, P tokens of a pool.
"""

from __future__ import annotations

import torch

from moe_engine.kernels.indexer.pools import PoolTurns
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.layers.attention.axis_rows import AxisRows


def turns_of(batch: ForwardBatch, table: RotaryTable, size: int, axes: AxisRows | None) -> PoolTurns:
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
        return PoolTurns(batch.positions, (batch.positions + (1 - size)).clamp_(min=0), table, size)
    rows, every = axes.rows(starts.axes.T), torch.arange(batch.num_tokens, device=starts.axes.device)
    return PoolTurns(starts.places, every, RotaryTable(rows, table.interleaved), size)
