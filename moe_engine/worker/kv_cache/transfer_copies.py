"""Worker side of disaggregation: `KVCopies` whose host rows the thread of transfers reads and writes."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

import numpy as np

from moe_engine.types import KVOps
from moe_engine.worker.kv_cache.kv_copies import KVCopies


class TransferCopies(KVCopies):
    """`stored`: number (`KVOps.serial`) of the last stores that are complete; may be read from any thread."""

    stored = 0

    @property
    def host_rows(self) -> np.ndarray:
        """[places, bytes of a token]"""
        return self._host.numpy()

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
