"""Final hidden states, after the last norm, of requests with `return_hidden_states`."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from torch import Tensor

from moe_engine.types import PositionRows, StepPlan
from moe_engine.worker.device_stream import DeviceStream, HostCopy


class PendingHidden:
    """States being copied to the host. `take` waits for them."""

    def __init__(self, rows: list[tuple[int, int, int]], copy: HostCopy) -> None:
        self._rows, self._copy = rows, copy

    def take(self) -> dict[int, PositionRows]:
        """[n, D] float32 of the n tokens of each row computed by the step."""
        return {
            row: PositionRows(start, count, states.float().numpy().tobytes())
            for (row, start, count), states in zip(self._rows, self._copy.wait())
        }


def pending_hidden(
    plan: StepPlan, offsets: np.ndarray, wanted: Collection[int], hidden: Tensor, stream: DeviceStream
) -> PendingHidden | None:
    """Begins to copy the states of the rows `wanted`. None: no such row.

    Args:
        offsets: [R], of each row's tokens in `hidden` [T, D]: batches have prompts in another order than plans.
    """
    rows, parts = [], []
    for row, begin, start, count in zip(plan.rows, offsets.tolist(), plan.starts, plan.counts):
        if row in wanted:
            rows.append((row, start, count))
            parts.append(hidden[begin : begin + count])
    return PendingHidden(rows, stream.download(parts)) if rows else None
