"""Measurements of several points in rounds, on a machine whose speed drifts.

A processor's clock moves by some percent within a minute, and by more while other programs run. Points that are
measured one after the other then differ by the time of their measurement. In rounds, each of which has all points, a
slow phase of the machine slows all points of a round alike: `Rounds` estimates this factor of each round and divides
by it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from moe_engine.tuning.stats import median

SWEEPS = 4
T = TypeVar("T")


class Rounds:
    """Values by point and round.

    Args:
        most_seconds: a point that has taken this time gets no further round.
    """

    def __init__(self, most_seconds: float = 4.0) -> None:
        self._most = most_seconds
        self._spent = defaultdict[Hashable, float](float)
        self._values = defaultdict[Hashable, list[tuple[int, float]]](list)
        self.number = -1
        """Number of the current round, from 0."""
        self.left_out: set[int] = set()
        """Rounds while other programs ran; their values count only where there are no others."""

    def begin(self) -> None:
        """Begins a round."""
        self.number += 1

    def wants(self, point: Hashable) -> bool:
        """Whether a point is measured in this round."""
        return self._spent[point] < self._most

    @contextmanager
    def timed(self, point: Hashable) -> Iterator[None]:
        """Counts the time of a measurement."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent[point] += time.perf_counter() - began

    def add(self, point: Hashable, value: float) -> None:
        """A positive value of the current round; the median of several counts as one."""
        self._values[point].append((self.number, value))

    def value(self, point: Hashable) -> float:
        """The median over the rounds, of the value of each round divided by its slowness. Raises KeyError."""
        slowness = self.slowness()
        found = self.kept((number, value / slowness[number]) for number, value in self._of_rounds(point).items())
        return median(found)

    def kept(self, values: Iterable[tuple[int, T]]) -> list[T]:
        """Values by round, without those of rounds that are left out, unless there are no others."""
        pairs = list(values)
        found = [value for number, value in pairs if number not in self.left_out]
        return found or [value for _, value in pairs]

    @property
    def spread(self) -> float:
        """How much longer the slowest of the rounds that count took than the fastest one, less 1."""
        found = self.kept(enumerate(self.slowness()))
        return max(found) / min(found) - 1 if found else 0.0

    def has(self, point: Hashable) -> bool:
        """Whether a point has a value."""
        return point in self._values

    def slowness(self) -> list[float]:
        """For each round: how much longer everything took than in the median of the rounds that count."""
        found = [1.0] * (self.number + 1)
        rows = [values for point in self._values if len(values := self._of_rounds(point)) > 1]
        for _ in range(SWEEPS if rows else 0):
            ratios = defaultdict[int, list[float]](list)
            for values in rows:
                middle = median(self.kept((number, value / found[number]) for number, value in values.items()))
                for number, value in values.items():
                    ratios[number].append(value / middle)
            found = [median(ratios[number]) if ratios[number] else 1.0 for number in range(len(found))]
            scale = median(self.kept(enumerate(found)))
            found = [factor / scale for factor in found]
        return found

    def _of_rounds(self, point: Hashable) -> dict[int, float]:
        if point not in self._values:
            raise KeyError(point)
        by_round = defaultdict[int, list[float]](list)
        for number, value in self._values[point]:
            by_round[number].append(value)
        return {number: median(values) for number, values in by_round.items()}
