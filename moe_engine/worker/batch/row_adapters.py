"""The adapter slot of each request row, and the adapters that captured steps read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from moe_engine.kernels.lora.protocol import TILE_TOKENS, AdapterTokens
from moe_engine.types import NO_LORA_SLOT, NewRow
from moe_engine.worker.device_stream import DeviceStream


class RowAdapters:
    """Adapter slots of `max_rows` rows; `types.NO_LORA_SLOT`: the base model."""

    def __init__(self, max_rows: int, num_slots: int, stream: DeviceStream) -> None:
        self._slots = np.full(max_rows, NO_LORA_SLOT, dtype=np.int64)
        self._num_slots = num_slots
        self._stream = stream
        self.captured: CapturedAdapters | None = None
        """Those of captured steps."""

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

    def capture(self, max_tokens: int) -> CapturedAdapters:
        """Makes `captured`, for steps of at most `max_tokens` tokens."""
        self.captured = CapturedAdapters(max_tokens, self._num_slots, self._stream)
        return self.captured


class CapturedAdapters:
    """The adapters of captured steps, in buffers that all graphs read. Tiles after those of a step are empty."""

    def __init__(self, max_tokens: int, num_slots: int, stream: DeviceStream) -> None:
        self._num_slots, self._upload, self._used = num_slots, stream.upload, 0
        self._order = torch.zeros(max_tokens, dtype=torch.int64, device=stream.device)
        self._tiles = torch.zeros(self._num_tiles(max_tokens), 3, dtype=torch.int32, device=stream.device)

    def _num_tiles(self, num_tokens: int) -> int:
        """The most tiles that tokens are grouped into."""
        return min(num_tokens, self._num_slots + num_tokens // TILE_TOKENS)

    def of(self, num_tokens: int) -> AdapterTokens:
        """What a step of so many tokens reads."""
        slots, runs = np.full(num_tokens, NO_LORA_SLOT), torch.zeros(0, 3, dtype=torch.int64)
        order, tiles = self._order[:num_tokens], self._tiles[: self._num_tiles(num_tokens)]
        return AdapterTokens(slots, (), runs, order, tiles, self._upload)

    def fill(self, tokens: AdapterTokens | None) -> None:
        """Copies the adapters of a step's tokens; None: none has one."""
        used, self._used = self._used, 0 if tokens is None else len(tokens.tiles)
        if tokens is not None:
            self._order[: len(tokens.order)].copy_(tokens.order)
            self._tiles[: self._used].copy_(tokens.tiles)
        if used > self._used:
            self._tiles[self._used : used].zero_()
