"""Computes logits from hidden states in passes of a bounded number of rows.

Logits are the largest tensors of a step: rows x vocabulary. Rows are independent, so a step with more rows than
`rows_at_once` runs the LM head and sampling in several passes. A step with fewer rows runs one pass. All ranks run the
same number of passes, given by the largest attention group's rows.

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
"""Processes the logits of some rows of the step: (rows, their logits)."""


class Head(Protocol):
    """`Model.logits`."""

    def __call__(self, hidden: Tensor, sizes: StepSizes | None = None, /) -> Tensor:
        """hidden [S, D] -> [S, V] float32."""


@dataclass(frozen=True)
class LogitsPasses:
    """Max rows of logits at once, which the memory ledger counts."""

    rows_at_once: int = 1 << 30

    def over(self, head: Head, hidden: Tensor, sizes: StepSizes | None, work: Work[T]) -> list[T]:
        """The results of `work` for each pass. `work` must not keep the logits: the next pass needs their memory.

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
        """Joins the passes of other attention groups with an idle batch; hidden [0, D]."""
        self.over(head, hidden, sizes, lambda part, logits: None)


UNBOUNDED = LogitsPasses()


def _within(sizes: StepSizes, begin: int, most: int) -> StepSizes:
    """The sizes of one pass."""
    return replace(sizes, logits=tuple(min(max(rows - begin, 0), most) for rows in sizes.logits))
