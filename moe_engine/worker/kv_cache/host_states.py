"""Host memory for states of cached prefixes in the host-RAM tier: the bytes of a snapshot on this rank, by entry."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.state_pool import StatePool


class HostStates:
    """
    Args:
        num_entries: states; the scheduler assigns entries.
    """

    def __init__(self, num_entries: int, pool: StatePool, stream: DeviceStream) -> None:
        self.pool = pool
        self.each_bytes = pool.snapshot_bytes
        self._stream = stream
        self._memory = stream.host_bytes(num_entries, self.each_bytes)

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def download(self, rows: list[Tensor], entries: list[int]) -> None:
        """States [B] of the device to entries; on the current stream."""
        for row, entry in zip(rows, entries):
            self._memory[entry].copy_(row, non_blocking=True)

    def upload(self, states: list[tuple[int, int]]) -> None:
        """States of entries to snapshots, (entry, snapshot) each; on the current stream."""
        for entry, snapshot in states:
            row = self._memory[entry]
            if self._stream.asynchronous:
                row = row.to(self._stream.device, non_blocking=True)
            self.pool.write_snapshot(snapshot, row)

    def page(self, entry: int) -> memoryview:
        """The bytes of an entry, to read or write."""
        memory: Any = self._memory[entry].numpy()
        return memoryview(memory).cast("B")
