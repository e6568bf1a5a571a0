"""Times between requests: Poisson, gamma (bursts) and a daily cycle."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

DAY = 86400.0
AMPLITUDE = 0.8
"""The rate of a day varies between 1 - AMPLITUDE and 1 + AMPLITUDE times the mean; it begins at its lowest."""
NAMES = ("poisson", "gamma", "diurnal")


def arrival_times(name: str, rate: float, rng: random.Random, *, burstiness: float = 1.0) -> Iterator[float]:
    """Seconds of arrivals, the first at 0; all at 0 for an infinite rate.

    Args:
        rate: requests per second, on average.
        burstiness: shape of gamma-distributed gaps: 1 is Poisson, below 1 burstier.
    """
    now = 0.0
    while True:
        yield now
        if math.isinf(rate):
            continue
        if name == "gamma":
            now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        elif name == "poisson":
            now += rng.expovariate(rate)
        else:
            now = _next_of_day(now, rate, rng)


def _next_of_day(now: float, rate: float, rng: random.Random) -> float:
    """By thinning: candidates at the highest rate are kept with probability current rate / highest rate."""
    highest = rate * (1 + AMPLITUDE)
    while True:
        now += rng.expovariate(highest)
        if rng.random() * highest < rate * (1 - AMPLITUDE * math.cos(2 * math.pi * now / DAY)):
            return now
