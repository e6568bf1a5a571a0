"""Worker side of disaggregation: `KVCopies` whose host rows the transfer thread reads and writes. A row is the KV of a
token in all layers of this rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import numpy as np
import torch

from moe_engine.types.kv_ops import KVOps
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
    def row_widths(self) -> list[int]:
        """Bytes of a row in each tensor of the KV pool, one after the other."""
        return self._pool.row_widths

    @property
    def undivided(self) -> set[int]:
        """Numbers of the tensors that every rank has whole."""
        return self._pool.undivided

    @property
    def state_rows(self) -> int:
        """Rows of a state, whose places are after those of the host pool; 0 without states."""
        return 0 if self._states is None else -(-self._states.each_bytes // self.row_bytes)

    def _state_part(self, places: list[int]) -> np.ndarray | None:
        """The bytes of a state in these places, which are neighbors; the last row may be shorter. None: the places are
        of tokens."""
        if self._states is None or places[0] < self._num_places:
            return None
        entry, first = divmod(places[0] - self._num_places, self.state_rows)
        begin = first * self.row_bytes
        return np.frombuffer(self._states.page(entry), np.uint8)[begin : begin + len(places) * self.row_bytes]

    def read_into(self, places: list[int], out: np.ndarray) -> None:
        """Copies the rows to out [n, row_bytes], contiguous."""
        if (part := self._state_part(places)) is not None:
            flat = out.reshape(-1)
            flat[: len(part)], flat[len(part) :] = part, 0
            return
        self.host.take_into(torch.tensor(places), torch.from_numpy(out))

    def write(self, places: list[int], rows: np.ndarray) -> None:
        """The inverse of `read_into`."""
        if (part := self._state_part(places)) is not None:
            part[:] = rows.reshape(-1)[: len(part)]
            return
        self.host.put(torch.tensor(places), torch.from_numpy(rows))

    def start(self, ops: KVOps) -> None:
        super().start(ops)
        if not ops.serial:
            return
        last = (self._storing_states if ops.state_stores else None) or self._storing
        if last is None:
            self.stored = ops.serial
        else:  # in plan order, so numbers arrive in order
            last.add_done_callback(partial(self._note, ops.serial))

    def _note(self, serial: int, done: Future[None]) -> None:
        if done.exception() is None:
            self.stored = serial
