"""Images of draft extends: the image tokens that follow the tokens of a step, and positions of the step's own.

Legend: n image tokens, R runs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moe_engine.models.batch import ForwardBatch, ImageRows
from moe_engine.worker.batch.row_images import RowImages
from moe_engine.worker.batch.step_batch import StepBatch
from moe_engine.worker.image_encoder import ImageEncoder


class DraftImages:
    """Image input of layers that draft from hidden states."""

    def __init__(self, rows: RowImages, encoder: ImageEncoder) -> None:
        self._rows = rows
        self._encoder = encoder

    def ahead(
        self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, offsets: np.ndarray, distance: int
    ) -> ImageRows | None:
        """The image tokens `distance` places after the tokens [starts[i], starts[i] + counts[i]) of each row, which
        begin at offsets[i] of the batch. The first token of the next chunk may need an image that no step has encoded
        yet. Without a token whose image is known or has pixels: None."""
        step = self._rows.find(rows, starts + distance, counts, offsets, self._encoder.has)
        return None if step is None else self._encoder.rows(step, keep=True)

    def placed(self, batch: StepBatch, forward: ForwardBatch) -> ForwardBatch:
        """A forward over a batch that was built again, with the positions of its image tokens."""
        images = batch.images
        if images is None or forward.images is not None or not self._rows.has_axes:
            return forward
        return replace(forward, images=self._encoder.positions(images))

    def end(self) -> None:
        """After the draft extend of a step: the tower's results may be dropped."""
        self._encoder.drop_oldest()
