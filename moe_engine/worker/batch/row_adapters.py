"""The adapter slot of each request row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_engine.kernels.lora.protocol import AdapterTokens
from moe_engine.types import NO_LORA_SLOT, NewRow
from moe_engine.worker.device_stream import DeviceStream


class RowAdapters:
    """Adapter slots of `max_rows` rows; `types.NO_LORA_SLOT`: the base model."""

    def __init__(self, max_rows: int, stream: DeviceStream) -> None:
        self._slots = np.full(max_rows, NO_LORA_SLOT, dtype=np.int64)
        self._stream = stream

    def enter(self, new_rows: Sequence[NewRow]) -> None:
        for new in new_rows:
            self._slots[new.row] = new.lora_slot

    def any(self, rows: np.ndarray) -> bool:
        """Whether one of the rows has an adapter."""
        return bool((self._slots[rows] >= 0).any())

    def of(self, rows: np.ndarray) -> AdapterTokens | None:
        """The adapters of tokens; rows [T]: the row of each token."""
        slots = self._slots[rows]
        return AdapterTokens.of(slots, self._stream.upload) if (slots >= 0).any() else None
