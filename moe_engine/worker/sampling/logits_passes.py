"""From hidden states to logits, a bounded number of rows at a time.

Logits are the largest tensors of a step: rows x vocabulary. No row looks at another, so a step with more rows than
`rows_at_once` runs the head and all that follows pass by pass. A step with fewer makes one pass, as if there were no
bound. All ranks make the same number of passes: it follows from the largest attention group's rows.

Legend: S rows of a step, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from torch import Tensor

from moe_engine.parallel.step_sizes import StepSizes

T = TypeVar("T")
Work = Callable[[slice, Tensor], T]
"""What is done with the logits of some rows of the step: rows, their logits."""


class Head(Protocol):
    """`Model.logits`."""

    def __call__(self, hidden: Tensor, sizes: StepSizes | None = None, /) -> Tensor:
        """hidden [S, D] -> [S, V] float32."""


@dataclass(frozen=True)
class LogitsPasses:
    """The bound. The memory ledger holds the logits of so many rows."""

    rows_at_once: int = 1 << 30

    def over(self, head: Head, hidden: Tensor, sizes: StepSizes | None, work: Work[T]) -> list[T]:
        """What `work` makes of each pass. Its logits must not be kept: the next pass needs their memory.

        Args:
            hidden: [S, D].
            sizes: of the step, with S of every attention group; collective then, also for S = 0.
        """
        most, count = self.rows_at_once, len(hidden)
        largest = count if sizes is None else max(sizes.logits)
        if largest <= most:
            return [work(slice(0, count), head(hidden, sizes))]
        out = []
        for begin in range(0, largest, most):
            part = slice(min(begin, count), min(begin + most, count))
            out.append(work(part, head(hidden[part], None if sizes is None else _within(sizes, begin, most))))
        return out

    def join(self, head: Head, hidden: Tensor, sizes: StepSizes) -> None:
        """Takes part in the passes of other attention groups; hidden [0, D]."""
        self.over(head, hidden, sizes, lambda part, logits: None)


UNBOUNDED = LogitsPasses()


def _within(sizes: StepSizes, begin: int, most: int) -> StepSizes:
    """The sizes of one pass."""
    return replace(sizes, logits=tuple(min(max(rows - begin, 0), most) for rows in sizes.logits))
