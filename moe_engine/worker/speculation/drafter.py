"""Interface of drafters. A rejected draft costs time, but never changes the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from moe_engine.models.batch import ForwardBatch
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.types import NewRow
from moe_engine.worker.batch.dp_step import chain_forwards
from moe_engine.worker.batch.step_batch import StepBatch
from moe_engine.worker.speculation.drafts import Drafts, DraftTask


@dataclass(frozen=True)
class Computed:
    """The input of a draft extend: runs of tokens that a step has computed, [starts[i], starts[i] + counts[i]) of
    request i.

    hidden [T, D] are the target's hidden states, run after run in the order of `batch`. The first kept[i] tokens of run
    i are accepted (later drafts were rejected); the token after the last accepted one is known.
    """

    rows: np.ndarray  # [R] int64
    starts: np.ndarray  # [R] int64
    counts: np.ndarray  # [R] int64
    kept: Tensor  # [R] int64: on the device, where it is known long before the host could read it
    offsets: np.ndarray  # [R] int64: start of each run in `hidden`
    hidden: Tensor  # [T, D]
    batch: StepBatch
    forward: ForwardBatch


class Drafter:
    """One drafter of a rank. The defaults are those of a drafter of chains without state and without a draft extend.
    Legend: D requests with drafts."""

    def enter(self, new: NewRow) -> None:
        """A new request in a row; resets the row's state."""

    def skip(self, rows: np.ndarray) -> None:
        """Rows [D] int64 get a token in a step without drafts."""

    def propose(self, task: DraftTask) -> Drafts:
        """Draft trees for the rows of a task; may write KV to the slots from a row's last token on."""
        raise NotImplementedError

    def forwards(self, num_drafting: int, depth: int) -> Sequence[tuple[int, int]]:
        """See `dp_step.DraftForwards`."""
        return chain_forwards(num_drafting, depth)

    def join(self, sizes: Sequence[StepSizes]) -> None:
        """Runs idle batches in draft forwards of these sizes of other attention groups; collective.

        A drafter without shared forwards does nothing.
        """

    def join_extend(self) -> None:
        """Runs idle batches in the draft extend of other attention groups; collective.

        A drafter whose draft extend has no shared forwards does nothing.
        """

    def update_cache(self, computed: Computed) -> None:
        """Draft extend: updates the drafter's KV cache with a step's tokens (plans with `Speculation.follow`)."""
