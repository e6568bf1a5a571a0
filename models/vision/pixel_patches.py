"""The end of image processors of our own: pixels become normalized patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def patch_rows(pixels: np.ndarray, patch: int, mean: Sequence[float], std: Sequence[float]) -> dict[str, np.ndarray]:
    """pixels [height, width, 3] float32 from 0 to 255, which are overwritten; both sides are multiples of `patch` ->
    `pixel_values` [P, 3 * patch * patch] float32 by row, `image_grid_thw` [1, 3]."""
    import numpy as np  # not in the process of the server, which imports the processors for the sizes

    pixels /= 255
    pixels -= mean
    pixels /= std
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    parts = pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    return {"pixel_values": parts.reshape(rows * columns, -1), "image_grid_thw": np.array([[1, rows, columns]])}
