"""Two-batch overlap (TBO) stages: work that yields where it waits for other ranks.

A module with such points has, in addition to `forward`, a generator `stages` that yields at each and returns
`forward`'s result. Run alone it equals `forward`; two interleaved generators are the two halves of a step.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")
Stages = Generator[None, None, Tensor]


def finish(stages: Generator[None, None, T]) -> T:
    """Runs all stages."""
    return interleave([stages])[0]


def interleave(works: Sequence[Generator[None, None, T]]) -> list[T]:
    """Runs each to its next yield, round-robin, until all have ended; the order is the same on every rank."""
    results: dict[int, T] = {}
    while len(results) < len(works):
        for i, work in enumerate(works):
            if i in results:
                continue
            try:
                next(work)
            except StopIteration as end:
                results[i] = end.value
    return [results[i] for i in range(len(works))]
