"""What the transfer threads need of the worker's copies (`worker.kv_cache.transfer_copies`)."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class StagedRows(Protocol):
    """Places of the host tier; a row is the KV of a token in all layers."""

    stored: int
    """Number of the last stores that are complete."""

    @property
    def row_bytes(self) -> int: ...

    def read(self, places: list[int]) -> np.ndarray:
        """[n, row_bytes], new memory."""

    def write(self, places: list[int], rows: np.ndarray) -> None:
        """The opposite of `read`."""
