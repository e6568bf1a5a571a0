"""How many passes a chunk of experts is given on its way, so that moves cost the same part of a step in every model."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

MAX_SHARE = 0.04
"""Of a pass, that moves may take between passes. The target is 5 %."""
MAX_PASSES = 64
LAST = 32
"""Measurements that count: medians of these, since a pass before which nobody asked anything seems long."""


class EPLBThrottle:
    """Seconds of the last passes, of the pauses in which chunks were put in place, and of their ways."""

    def __init__(self) -> None:
        self._passes: deque[float] = deque(maxlen=LAST)
        self._pauses: deque[float] = deque(maxlen=LAST)
        self._ways: deque[float] = deque(maxlen=LAST)

    def passed(self, seconds: float) -> None:
        self._passes.append(seconds)

    def moved(self, pause: float, way: float) -> None:
        """A chunk was under way for so long, beside passes, and then kept one waiting."""
        self._pauses.append(pause)
        self._ways.append(way)

    @property
    def passes_per_move(self) -> int:
        """So many that a chunk arrives meanwhile, and its pause is `MAX_SHARE` of them at most; 1 before the first."""
        if not self._passes or not self._pauses:
            return 1
        step = max(median(self._passes), 1e-9)
        needed = max(median(self._ways) / step, median(self._pauses) / (MAX_SHARE * step))
        return min(max(math.ceil(needed), 1), MAX_PASSES)
