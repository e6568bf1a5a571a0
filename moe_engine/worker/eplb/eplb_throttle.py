"""EPLB throttle: passes per chunk of moved experts, so that moves cost the same share of a step for every model."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

MAX_SHARE = 0.04
"""Max share of a pass for pauses of moves. The target is 5 %."""
MAX_PASSES = 64
LAST = 32
"""Number of latest measurements whose median is used, since a pass after an idle time appears long."""


class EPLBThrottle:
    """Seconds of the last passes, of pauses that swap in chunks, and of their transfers."""

    def __init__(self) -> None:
        self._passes: deque[float] = deque(maxlen=LAST)
        self._pauses: deque[float] = deque(maxlen=LAST)
        self._transfers: deque[float] = deque(maxlen=LAST)

    def add_pass(self, seconds: float) -> None:
        self._passes.append(seconds)

    def add_move(self, pause: float, transfer: float) -> None:
        """Adds the pause of a chunk, and the time of its transfer during passes."""
        self._pauses.append(pause)
        self._transfers.append(transfer)

    @property
    def passes_per_move(self) -> int:
        """Passes in which a chunk's transfer completes, with a pause of at most `MAX_SHARE`; 1 before the first."""
        if not self._passes or not self._pauses:
            return 1
        step = max(median(self._passes), 1e-9)
        needed = max(median(self._transfers) / step, median(self._pauses) / (MAX_SHARE * step))
        return min(max(math.ceil(needed), 1), MAX_PASSES)
