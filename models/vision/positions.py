"""Positions of three axes (multimodal rope): frame, row and column of image tokens, three equal numbers for text.

An image begins at the next free position; the text after it continues after the larger of its rows and columns, so that
positions after images are smaller than places in the sequence (source: Qwen2-VL, arXiv 2409.12191).

Legend: L tokens of a prompt, N tokens of an image.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_engine.models.vision.grid import Grid


def axis_positions(num_tokens: int, images: Sequence[tuple[int, Grid]], merge: int) -> tuple[np.ndarray, int]:
    """Positions [3, L] int64 of a prompt's tokens, and the offset added to the place of a token after the last image.

    Args:
        images: (place of the first token, patches) of each image, in order.
    """
    out = np.empty((3, num_tokens), dtype=np.int64)
    place = shift = 0
    for start, (frames, rows, columns) in images:
        out[:, place:start] = np.arange(place, start) + shift
        rows, columns = rows // merge, columns // merge
        place = start + frames * rows * columns
        axes = np.meshgrid(np.arange(frames), np.arange(rows), np.arange(columns), indexing="ij")
        first = start + shift
        out[:, start:place] = np.stack(axes).reshape(3, -1) + first
        shift = first + max(rows, columns) - place
    out[:, place:] = np.arange(place, num_tokens) + shift
    return out, shift
