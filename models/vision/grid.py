"""Order and positions of the patches of an image in a tower with windows.

The image processor writes patches by token: the M x M patches of a token are adjacent, tokens are ordered by row.

Legend: P patches, N tokens of an image, M patches of a token in one direction, R rotary width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches."""


@dataclass(frozen=True)
class TokenOrder:
    """Tokens of an image, window by window.

    `order`: numbers of the tokens in the windows' order; `back`: the inverse; `lens`: patches of each window.
    """

    order: Tensor  # [N] int64
    back: Tensor  # [N] int64
    lens: tuple[int, ...]


@lru_cache(64)
def window_order(grid: Grid, merge: int, window: int) -> TokenOrder:
    """Windows of `window` x `window` tokens, smaller at the edges, by row; frames one after the other."""
    frames, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    number = torch.arange(frames * rows * columns).view(frames, rows, columns)
    found = [
        number[frame, top : top + window, left : left + window].flatten()
        for frame in range(frames)
        for top in range(0, rows, window)
        for left in range(0, columns, window)
    ]
    order = torch.cat(found)
    return TokenOrder(order, order.argsort(), tuple(len(part) * merge**2 for part in found))


@lru_cache(64)
def patch_places(grid: Grid, merge: int) -> Tensor:
    """Row and column of each patch of a frame, [2, P] int64, in the processor's order."""
    _, rows, columns = grid
    places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))  # [2, rows, columns]
    blocks = places.view(2, rows // merge, merge, columns // merge, merge)
    return blocks.transpose(2, 3).reshape(2, -1)


def patch_angles(grid: Grid, merge: int, width: int, theta: float) -> Tensor:
    """Rotary table of the patches of an image, [P, R] float32: cosines of row and column, then their sines. The first
    half of the R/2 pairs rotates with the row, the second with the column; both have the same frequencies."""
    pairs = torch.arange(0, width // 2, 2, dtype=torch.float32)
    inverse = 1.0 / theta ** (pairs / (width // 2))  # [R/4]
    angles = (patch_places(grid, merge).unsqueeze(2) * inverse).transpose(0, 1).flatten(1)  # [P, R/2]
    return torch.cat((angles.cos(), angles.sin()), 1).repeat(grid[0], 1)
