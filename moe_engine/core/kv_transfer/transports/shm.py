"""Row ``shm``: two servers of one machine; the prefill side writes to memory of the decode side.

The memory is a file in /dev/shm with mode 0600, whose name is removed once the peer has opened it.
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
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
    no_bytes_here,
)

FOLDER = Path("/dev/shm")
PREFIX = "moe-engine-kv-"
_NAME = re.compile(re.escape(PREFIX) + r"[A-Za-z0-9_]+")


class SharedMemoryTransport:
    """Implements `Transport`."""

    def __init__(self, host: str, send: Send) -> None:
        self._peers: dict[bytes, np.ndarray] = {}
        self._names: set[Path] = set()

    def register(self, num_bytes: int, *, is_target: bool = True) -> Memory:
        if not is_target:  # without a name, which a killed process would leave behind
            return Memory(np.empty(num_bytes, np.uint8))
        try:
            file, name = tempfile.mkstemp(prefix=PREFIX, dir=FOLDER)
            try:
                os.posix_fallocate(file, 0, num_bytes)  # allocates now: a full /dev/shm would kill the process later
                array = _map(file, num_bytes)
                inode = os.fstat(file).st_ino
            except OSError:
                os.unlink(name)
                raise
            finally:
                os.close(file)
        except OSError as error:
            raise TransportError(f"{num_bytes} bytes of shared memory ({FOLDER}): {error.strerror}") from None
        path = Path(name)
        self._names.add(path)
        return Memory(array, wire.encode([path.name, inode, num_bytes]), path)

    def release(self, memory: Memory) -> None:
        if memory.handle is None:
            return
        self._names.discard(memory.handle)
        with suppress(OSError):
            memory.handle.unlink()

    def open(self, peer: bytes, description: bytes) -> None:
        try:
            name, inode, num_bytes = msgspec.msgpack.decode(description, type=tuple[str, int, int])
        except msgspec.MsgspecError as error:
            raise TransportError(f"the description of the peer's memory cannot be read: {error}") from None
        if not _NAME.fullmatch(name):
            raise TransportError(f"{name!r:.60}: not a name of shared memory of this engine")
        try:
            file = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW)
            try:
                found = os.fstat(file)
                if (found.st_ino, found.st_size) != (inode, num_bytes):
                    raise FileNotFoundError
                self._peers[peer] = _map(file, num_bytes)
            finally:
                os.close(file)
            (FOLDER / name).unlink()
        except OSError as error:
            why = "not found" if isinstance(error, FileNotFoundError) else error.strerror
            raise TransportError(
                "--disaggregation-transfer-backend shm: the memory of the decode server is not on this machine, or "
                f"not in this container's /dev/shm ({why}); use tcp"
            ) from None

    def write(self, peer: bytes, memory: Memory, blocks: Sequence[Block]) -> Write:
        target = self._peers.get(peer)
        if target is None:
            raise TransportError("the peer has no memory")
        check_blocks(blocks, memory.array.nbytes, target.nbytes)
        for local, remote, length in blocks:
            target[remote : remote + length] = memory.array[local : local + length]
        return Done()

    def receive(self, values: list[Any], payload: Any) -> None:
        raise no_bytes_here("shm")

    def forget(self, peer: bytes) -> None:
        self._peers.pop(peer, None)

    def close(self) -> None:
        for path in self._names:
            with suppress(OSError):
                path.unlink()
        self._names.clear()
        self._peers.clear()


def _map(file: int, num_bytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(file, num_bytes), np.uint8)
