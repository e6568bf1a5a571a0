"""State pool: the states of requests in layers without KV, addressed by request row. The scheduler assigns rows.

A state begins as zeros when a request takes its row, or as a copy of the snapshot after its cached prefix. The row
after those of requests is unused: padding of captured steps reads and writes there. Snapshots follow, for prefixes in
the radix cache; the scheduler assigns their slots (`scheduler/kv_cache/state_kv_cache.py`). Then come the states of
draft positions: a verification stores the state after each token, and the state after the last accepted token is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.models.config_sections.state import StateGroup
from moe_engine.types import NewRow, StepPlan
from moe_engine.worker.device_stream import DeviceStream


class StatePool:
    """`layers[i][part]` is `ForwardBatch.kv[i][part]`: [rows, *shape], of requests, snapshots and draft positions.

    Args:
        groups: with the shapes of one rank.
        dtype: of the activations, for parts without a dtype of their own.
        num_positions: max tokens of a request in a verification; 0: no drafts.
    """

    def __init__(
        self,
        groups: Sequence[StateGroup],
        max_rows: int,
        dtype: torch.dtype,
        stream: DeviceStream,
        num_snapshots: int = 0,
        num_positions: int = 0,
    ) -> None:
        self.max_rows = max_rows
        self.first_snapshot = max_rows + 1
        self._first_position = self.first_snapshot + num_snapshots
        self._num_positions = num_positions
        num_rows = self._first_position + max_rows * num_positions
        self._stream = stream
        self._parts: list[Tensor] = []  # for each group [its layers, rows, *shape]: cleared and copied in one call
        self.layers: dict[int, tuple[Tensor, ...]] = {}
        for group in groups:
            parts = [
                stream.lazy_zeros(
                    (len(group.layers), num_rows, *part.shape),
                    dtype if part.dtype is None else getattr(torch, part.dtype),
                )
                for part in group.parts
            ]
            self._parts += parts
            self.layers.update({layer: tuple(part[i] for part in parts) for i, layer in enumerate(group.layers)})

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def tensors(self) -> list[Tensor]:
        """All tensors of the groups."""
        return list(self._parts)

    def enter(self, new_rows: Sequence[NewRow]) -> None:
        """Sets the states of new rows: to zeros, or to their snapshots."""
        empty = [new.row for new in new_rows if new.snapshot < 0]
        if empty:
            index = self._stream.from_list(empty, torch.int64)
            for part in self._parts:
                part.index_fill_(1, index, 0)
        self._copy([(self.first_snapshot + new.snapshot, new.row) for new in new_rows if new.snapshot >= 0])

    def save(self, saves: Sequence[tuple[int, int]]) -> None:
        """Stores the states of rows in snapshots, (row, snapshot) each."""
        self._copy([(row, self.first_snapshot + snapshot) for row, snapshot in saves])

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one state in all layers."""
        return sum(part[:, 0].nbytes for part in self._parts)

    def read_snapshot(self, snapshot: int) -> Tensor:
        """The bytes [B] of a snapshot; new memory."""
        row = self.first_snapshot + snapshot
        return torch.cat([part[:, row].contiguous().flatten().view(torch.uint8) for part in self._parts])

    def write_snapshot(self, snapshot: int, state: Tensor) -> None:
        """The inverse of `read_snapshot`."""
        row, begin = self.first_snapshot + snapshot, 0
        for part in self._parts:
            target = part[:, row]
            piece = state[begin : begin + target.nbytes].clone()  # at the beginning of memory: aligned for any dtype
            target.copy_(piece.view(part.dtype).view(target.shape))
            begin += target.nbytes

    def save_ends(self, plan: StepPlan) -> None:
        """Stores the snapshots of a plan whose state is that after its chunk, which has run."""
        if plan.state_ops is None or not plan.state_ops.cuts:
            return
        ends = {row: start + count for row, start, count in zip(plan.rows, plan.starts, plan.counts)}
        self.save([(row, snapshot) for row, length, snapshot in plan.state_ops.cuts if length == ends[row]])

    def positions(self, rows: np.ndarray, count: int) -> np.ndarray:
        """The rows of the pool [R, count] for the states after each of `count` tokens of rows [R] in a verification."""
        return self.first_positions(rows)[:, None] + np.arange(count)

    def first_positions(self, rows: Any) -> Any:
        """The same for the first token of each row [R], an array or a tensor."""
        return self._first_position + rows * self._num_positions

    def accept(self, rows: Tensor, counts: Tensor) -> None:
        """Keeps, for rows [D] int64, the state after their first counts[i] tokens of a verification."""
        self.move(self.first_positions(rows) + counts - 1, rows)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copies states between rows of the pool, [D] int64 each."""
        for part in self._parts:
            part.index_copy_(1, targets, part.index_select(1, sources))

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        sources, targets = self._stream.from_list([at for pair in pairs for at in pair], torch.int64).view(-1, 2).T
        self.move(sources, targets)
