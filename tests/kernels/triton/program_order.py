"""Programs of a launch in a random order under Triton's interpreter, which runs them in the order of their numbers.

GPUs start programs in any order: a kernel whose result depends on it reads what other programs of its launch write.
Grids that a device does not launch are errors.
"""

from __future__ import annotations

import itertools
import os
import random

from triton.runtime.interpreter import interpreter_builder

from tests.kernels.triton import grid_limits
from tests.random_seed import NAME

_random = random.Random(os.environ.get(NAME))
_dimensions, _place = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx


class _AnyOrder:
    """All programs of a launch once."""

    def __init__(self) -> None:
        self._places: list[tuple[int, ...]] = []

    def set_grid_dim(self, *grid: int) -> None:
        grid_limits.check("a kernel", grid)
        self._places = list(itertools.product(*map(range, grid)))
        _random.shuffle(self._places)
        _dimensions(*grid)

    def set_grid_idx(self, *place: int) -> None:
        _place(*self._places.pop())


def install() -> None:
    """Installs the order for the whole process; idempotent."""
    order = _AnyOrder()
    interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx = order.set_grid_dim, order.set_grid_idx
