"""Seconds of successive steps, summed with the weights of `StepTimes`: a part of any length is taken in O(1)."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 1 / 256
"""Weight of a new observation in means."""
SHORT_MEMORY = 1 / 512


@dataclass(slots=True)
class Steps:
    """Some successive steps: their number, and the sums of their seconds in which each step has 1 - `MEMORY`
    (`weighted`) or 1 - `SHORT_MEMORY` (`recent`) times the weight of the next one."""

    count: int = 0
    weighted: float = 0.0
    recent: float = 0.0


class StepSums:
    """All steps so far."""

    def __init__(self) -> None:
        self._all = Steps()

    def add(self, first: float, last: float | None = None, count: int = 1) -> None:
        """Adds `count` steps, whose seconds change linearly from `first` to `last`."""
        step = (last - first) / (count - 1) if last is not None and count > 1 else 0.0
        before = self._all
        self._all = Steps(
            before.count + count,
            before.weighted * (1 - MEMORY) ** count + _linear(1 - MEMORY, first, step, count),
            before.recent * (1 - SHORT_MEMORY) ** count + _linear(1 - SHORT_MEMORY, first, step, count),
        )

    def mark(self) -> Steps:
        """The end of the steps so far, for `since`."""
        return self._all

    def since(self, mark: Steps) -> Steps:
        """The steps after a mark."""
        return between(mark, self._all)


def between(begin: Steps, end: Steps) -> Steps:
    """The steps after a mark, up to a later one."""
    count = end.count - begin.count
    return Steps(
        count,
        end.weighted - begin.weighted * (1 - MEMORY) ** count,
        end.recent - begin.recent * (1 - SHORT_MEMORY) ** count,
    )


def weights(keep: float, count: int) -> float:
    """Sum of the weights of `count` steps."""
    return (1 - keep**count) / (1 - keep)


def _linear(keep: float, first: float, step: float, count: int) -> float:
    """Weighted sum of the values first, first + step, ..."""
    if count == 1:
        return first
    all_of = weights(keep, count)
    return first * all_of + step * (count - all_of) / (1 - keep)
