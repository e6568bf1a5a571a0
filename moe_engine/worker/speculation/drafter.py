"""What every drafter offers. It guesses; a wrong guess costs time, never a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from moe_engine.models.batch import ForwardBatch
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.types import NewRow
from moe_engine.worker.batch.step_batch import StepBatch
from moe_engine.worker.speculation.drafts import Drafts, DraftTask


@dataclass(frozen=True)
class Computed:
    """Tokens that a step has computed for good, in runs: request i has those at [starts[i], starts[i] + counts[i]).

    hidden [T, D] are the target's states, one run behind the other in the order of `batch`. Of run i only the first
    kept[i] tokens stand (the drafts behind were rejected); the token after the last of them is known.
    """

    rows: np.ndarray  # [R] int64
    starts: np.ndarray  # [R] int64
    counts: np.ndarray  # [R] int64
    kept: Tensor  # [R] int64: on the device, where it is known long before the host could read it
    offsets: np.ndarray  # [R] int64: where a run begins in `hidden`
    hidden: Tensor  # [T, D]
    batch: StepBatch
    forward: ForwardBatch


class Drafter(Protocol):
    """One drafter of a rank. Legend: D requests with drafts."""

    def enter(self, new: NewRow) -> None:
        """A row begins; its earlier state is void."""

    def propose(self, task: DraftTask) -> Drafts:
        """Draft trees for the rows of a task; may write KV at the slots from a row's last token on."""

    def join(self, sizes: Sequence[StepSizes]) -> None:
        """Forwards of these sizes in which other attention groups draft and this one does not; collective.

        A drafter whose forwards meet no other group's does nothing.
        """

    def update_cache(self, computed: Computed) -> None:
        """Takes in what a step computed (plans with `Speculation.follow`)."""
