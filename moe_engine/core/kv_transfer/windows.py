"""The memory that a prefill and a decode rank share for their transfers: slots of one piece each.

A connection has its own memory on the decode side, so a late write cannot damage KV. At worst it damages a slot, whose
bytes then do not match the checksum of their notification. The prefill side has memory of the same size, from which its
writes read, and chooses the slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moe_engine.core.kv_transfer.transports.protocol import Memory, Transport, TransportError, Write


@dataclass
class SendWindow:
    """The prefill side. A slot is in use from `take` until its bytes were acknowledged, or its transfer has ended;
    in both cases no earlier than its write."""

    memory: Memory
    slot_bytes: int
    num_slots: int
    free: list[int] = field(default_factory=list)
    late: list[tuple[Write, int]] = field(default_factory=list)
    """Writes of ended transfers."""

    def __post_init__(self) -> None:
        self.free = list(range(self.num_slots))

    def rows(self, slot: int, num_bytes: int) -> np.ndarray:
        begin = slot * self.slot_bytes
        return self.memory.array[begin : begin + num_bytes]

    def write(self, transport: Transport, peer: bytes, slot: int, num_bytes: int) -> Write:
        begin = slot * self.slot_bytes
        return transport.write(peer, self.memory, [(begin, begin, num_bytes)])

    def give(self, slot: int, write: Write | None) -> None:
        """`write`: a write that may still be in progress."""
        if write is None:
            self.free.append(slot)
        else:
            self.late.append((write, slot))

    def has_room(self) -> bool:
        if not self.free:
            self._poll()
        return bool(self.free)

    def _poll(self) -> None:
        """Frees the slots of late writes that have ended."""
        still = []
        for write, slot in self.late:
            if has_ended(write):
                self.free.append(slot)
            else:
                still.append((write, slot))
        self.late = still


def has_ended(write: Write) -> bool:
    try:
        return write.poll()
    except TransportError:
        return True
