"""Random seconds of steps: on a machine that does other work too, equal steps differ from each other.

Their mean is the cost. A queue is longer behind steps of random length, and the slowest percent of the answers is
slower, also where the throughput is the same.
"""

from __future__ import annotations

import math
import random


class StepNoise:
    """
    Args:
        spread: standard deviation of the log-normal seconds over their mean; 0: none.
    """

    def __init__(self, spread: float, seed: int) -> None:
        self._variance, self._rng = math.log1p(spread**2), random.Random(seed)

    def seconds(self, mean: float) -> float:
        """Of the next step."""
        if not self._variance:
            return mean
        return mean * self._rng.lognormvariate(-self._variance / 2, math.sqrt(self._variance))
