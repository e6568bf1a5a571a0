"""State pool: the states of requests in layers without KV, addressed by request row. The scheduler assigns rows.

A state begins as zeros when a request takes its row, also when a retracted request returns and is computed again. The
last row belongs to no request: a kernel that pads its sequences reads and writes there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_engine.models.config import StateGroup
from moe_engine.worker.device_stream import DeviceStream


class StatePool:
    """`layers[i][part]` is `ForwardBatch.kv[i][part]`: [max_rows + 1, *shape].

    Args:
        groups: with the shapes of one rank.
        dtype: of the activations, for parts without a dtype of their own.
    """

    def __init__(self, groups: Sequence[StateGroup], max_rows: int, dtype: torch.dtype, stream: DeviceStream) -> None:
        self.max_rows = max_rows
        self._stream = stream
        self._parts: list[Tensor] = []  # of a group, [its layers, max_rows + 1, *shape]: cleared in one call
        self.layers: dict[int, tuple[Tensor, ...]] = {}
        for group in groups:
            parts = [
                stream.lazy_zeros(
                    (len(group.layers), max_rows + 1, *part.shape),
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

    def clear(self, rows: Sequence[int]) -> None:
        """Sets the states of these rows to zeros."""
        index = self._stream.from_list(list(rows), torch.int64)
        for part in self._parts:
            part.index_fill_(1, index, 0)
