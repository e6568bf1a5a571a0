"""Worker side of disaggregation: `KVCopies` whose host rows the transfer thread reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import numpy as np
import torch

from moe_engine.kv_ops import KVOps
from moe_engine.worker.kv_cache.kv_copies import KVCopies


class TransferCopies(KVCopies):
    """`stored`: number (`KVOps.serial`) of the last complete stores; may be read from any thread. `on_join`: on a
    follower, called with the address at which its leader commands the transfers of the group."""

    stored = 0
    on_join: Callable[[str], None] = staticmethod(lambda address: None)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token."""
        return sum(self._pool.row_widths)

    def read(self, places: list[int]) -> np.ndarray:
        """Rows of the host pool [n, row_bytes]; new memory. Callable from any thread."""
        return self.host.take(torch.tensor(places)).contiguous().numpy()

    @property
    def num_tensors(self) -> int:
        return sum(width > 0 for width in self._pool.row_widths)

    def read_into(self, places: list[int], out: np.ndarray) -> None:
        """Copies the rows to out [n, row_bytes]."""
        self.host.take_into(torch.tensor(places), torch.from_numpy(out))

    def write(self, places: list[int], rows: np.ndarray) -> None:
        """The inverse of `read`."""
        self.host.put(torch.tensor(places), torch.from_numpy(rows))

    def start(self, ops: KVOps) -> None:
        super().start(ops)
        if not ops.serial:
            return
        if self._storing is None:
            self.stored = ops.serial
        else:  # in plan order, so numbers arrive in order
            self._storing.add_done_callback(partial(self._note, ops.serial))

    def _note(self, serial: int, done: Future[None]) -> None:
        if done.exception() is None:
            self.stored = serial
