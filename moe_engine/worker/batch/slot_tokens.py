"""The token in each KV slot, kept while requests with penalties run.

A penalty counts the tokens that a row of logits was computed behind: exactly the tokens whose KV the row's attention
reads. Their slots stand in the slot table, so 4 bytes a slot are enough, whatever the vocabulary and the number of
rows. Nothing is counted after a draw and nothing is taken back after a rejected draft: the length of a row decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_engine.worker.batch.device_int_table import DeviceIntTable
from moe_engine.worker.device_stream import DeviceStream


class SlotTokens:
    """Token ids by slot, on the device.

    Args:
        num_slots: of the KV pool, the dummy page included.
    """

    def __init__(self, num_slots: int, stream: DeviceStream) -> None:
        self._stream = stream
        self.ids: Tensor = stream.lazy_zeros((num_slots,), torch.int32)  # [num_slots]
        self._table = DeviceIntTable(self.ids, stream)

    def put(self, slots: Tensor, tokens: Tensor) -> None:
        """Slots [T] int64 hold tokens [T] int64."""
        self._table.put(slots, tokens)

    def put_from_host(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """The same from host values."""
        self._table.put_from_host(np.array(slots, dtype=np.int64), np.array(tokens, dtype=np.int32))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Slots target [n] hold what slots source [n] hold; all is read before any is written."""
        self._table.put(target, self._table.take(source))
