"""Deepstack: rows of the vision tower that are added to the residual stream after the first layers (Qwen3-VL).

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from torch import Tensor

from moe_engine.models.batch import ForwardBatch


class DeepstackRows:
    """Adds part `number` of `ImageRows.rows`, which has `hidden` columns, to the residual stream of a layer."""

    def __init__(self, number: int, hidden: int) -> None:
        self._columns = slice(number * hidden, (number + 1) * hidden)

    def add(self, residual: Tensor, batch: ForwardBatch) -> None:
        """residual [T, D], in place."""
        images = batch.images
        if images is not None:
            residual.index_add_(0, images.tokens, images.rows[:, self._columns])
