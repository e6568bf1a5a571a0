"""Token ids by KV slot, stored while requests with penalties run.

A penalty counts the context tokens of a row of logits: exactly the tokens whose KV the row's attention reads. Their
slots are in the slot table, so 4 bytes per slot suffice, whatever the vocabulary and the number of rows. Sampling and
rejected drafts need no update of counts: the length of a row decides which tokens count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_engine.worker.device_int_table import DeviceIntTable
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
        """Stores tokens [T] int64 of slots [T] int64."""
        self._table.put(slots, tokens)

    def put_from_host(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """The same from host values."""
        self._table.put_from_host(np.array(slots, dtype=np.int64), np.array(tokens, dtype=np.int32))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copies slots source [n] to slots target [n]; reads everything before writing."""
        self._table.put(target, self._table.take(source))
