"""The interface of a KV transport: `Transport`.

One-sided writes: the decode side registers memory and sends its description over the control connection
(`core.kv_transfer.wire`); the prefill side writes to it. The control connection also carries the notifications: the
prefill side sends one when `poll` of a write is true, so it follows the bytes on every row.

All calls are made by one thread, that of the transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from moe_engine.errors import MoeEngineError

Block = tuple[int, int, int]
"""(offset in the local memory, offset in the peer's memory, length), in bytes."""

Send = Callable[[bytes, list[Any]], None]
"""Sends frames over the control connection to a peer; a lost peer is reported there."""


class TransportError(MoeEngineError):
    """The bytes did not arrive, or the peer's memory cannot be reached from here."""


@dataclass
class Memory:
    """Registered memory.

    Args:
        array: uint8 [bytes].
        description: what a peer needs to write to it.
        handle: of the transport.
    """

    array: np.ndarray
    description: bytes = b""
    handle: Any = field(default=None, repr=False)


class Write(Protocol):
    """A write that has begun. The local bytes stay unchanged until it ends."""

    def poll(self) -> bool:
        """Whether the bytes are in the peer's memory; does not wait.

        Raises:
            TransportError: the write failed; no further bytes are written there.
        """


class Transport(Protocol):
    def register(self, num_bytes: int, *, is_target: bool = True) -> Memory:
        """New memory that writes may read from.

        Args:
            is_target: peers write to it, by its description.

        Raises:
            TransportError: the memory cannot be allocated or registered.
        """

    def release(self, memory: Memory) -> None:
        """The inverse of `register`. A peer that still writes to the memory changes no other memory."""

    def open(self, peer: bytes, description: bytes) -> None:
        """Prepares writes to a peer's memory; the latest description applies.

        Raises:
            TransportError: it cannot be reached.
        """

    def write(self, peer: bytes, memory: Memory, blocks: Sequence[Block]) -> Write:
        """Begins to write blocks of `memory` to the peer's.

        Raises:
            TransportError: it cannot begin.
        """

    def receive(self, values: list[Any], payload: Any) -> None:
        """Bytes that arrived over the control connection, for transports that send them there.

        Raises:
            TransportError: they belong to no memory of this side.
        """

    def forget(self, peer: bytes) -> None:
        """The peer is lost."""

    def close(self) -> None: ...


class Done:
    """A `Write` that was complete when it began."""

    def poll(self) -> bool:
        return True


def check_blocks(blocks: Sequence[Block], local_bytes: int, remote_bytes: int) -> None:
    """
    Raises:
        TransportError: a block is outside of one of the two memories.
    """
    for local, remote, length in blocks:
        if min(local, remote, length) < 0 or local + length > local_bytes or remote + length > remote_bytes:
            raise TransportError(f"a block of {length} bytes at {local} is outside of the memory")


def no_bytes_here(name: str) -> TransportError:
    return TransportError(f"--disaggregation-transfer-backend {name}: bytes arrived over the control connection")
