"""Row ``tcp``: the bytes travel over the control connection itself, which is ZeroMQ over TCP.

A notification cannot overtake them, and with a secret they are encrypted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from moe_engine.core.kv_transfer import wire
from moe_engine.core.kv_transfer.transports.protocol import (
    Block,
    Done,
    Memory,
    Send,
    TransportError,
    Write,
    check_blocks,
)


class TcpTransport:
    """Implements `Transport`."""

    def __init__(self, host: str, send: Send) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._memories: dict[int, Memory] = {}
        self._peers: dict[bytes, tuple[int, int]] = {}
        """Peer -> (number of its memory, bytes)."""

    def register(self, num_bytes: int, *, is_target: bool = True) -> Memory:
        number = next(self._numbers)
        description = wire.encode([number, num_bytes])
        self._memories[number] = Memory(np.empty(num_bytes, np.uint8), description, number)
        return self._memories[number]

    def release(self, memory: Memory) -> None:
        self._memories.pop(memory.handle, None)

    def open(self, peer: bytes, description: bytes) -> None:
        try:
            number, num_bytes = msgspec.msgpack.decode(description, type=tuple[int, int])
        except msgspec.MsgspecError as error:
            raise TransportError(f"the description of the peer's memory cannot be read: {error}") from None
        self._peers[peer] = number, num_bytes

    def write(self, peer: bytes, memory: Memory, blocks: Sequence[Block]) -> Write:
        if peer not in self._peers:
            raise TransportError("the peer has no memory")
        number, num_bytes = self._peers[peer]
        check_blocks(blocks, memory.array.nbytes, num_bytes)
        for local, remote, length in blocks:
            self._send(peer, [wire.encode(["bytes", number, remote]), memory.array[local : local + length]])
        return Done()

    def receive(self, values: list[Any], payload: Any) -> None:
        number, offset = values
        memory = self._memories.get(number)
        if memory is None:
            raise TransportError("bytes arrived for memory that was released")
        rows = np.frombuffer(payload, np.uint8)
        check_blocks([(0, offset, rows.nbytes)], rows.nbytes, memory.array.nbytes)
        memory.array[offset : offset + rows.nbytes] = rows

    def forget(self, peer: bytes) -> None:
        self._peers.pop(peer, None)

    def close(self) -> None:
        self._memories.clear()
