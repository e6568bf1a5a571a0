"""The grids that a device launches.

Sources: CUDA C programming guide, technical specifications per compute capability; `_launch` of
triton/backends/nvidia/driver.c, which multiplies the dimensions in 32 bits and launches nothing if the product is not
positive.
"""

from __future__ import annotations

from math import prod

MOST_Y_Z = 65535
MOST = (1 << 31) - 1


class GridError(ValueError):
    """A grid of no program, or with more than a device launches."""


def check(kernel: str, grid: tuple[int, ...]) -> None:
    """Raises GridError."""
    if min(grid) < 1 or prod(grid) > MOST or max(grid[1:], default=1) > MOST_Y_Z:
        raise GridError(f"{kernel} cannot be launched with a grid of {grid}")
