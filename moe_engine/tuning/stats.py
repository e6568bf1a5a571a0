"""Percentiles and similar statistics of plain lists; no numpy, so that tests and server-side tools stay light."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100), linear interpolation as in numpy's default; 0 for an empty list."""
    if not values:
        return 0.0
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def std(values: Sequence[float]) -> float:
    """Population standard deviation, numpy's default."""
    if not values:
        return 0.0
    center = mean(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / len(values))


def spread(values: Sequence[float]) -> float:
    """(max - min) / median: spread of repeated runs; 0 for fewer than two."""
    return (max(values) - min(values)) / median(values) if len(values) > 1 and median(values) else 0.0
